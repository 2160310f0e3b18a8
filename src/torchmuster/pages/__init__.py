"""How every page of the product looks: its frame, and pictures as SVG."""
