"""HTML pages: the page frame, and charts as SVG."""
