"""Reports of a plan: terminal, JSON and HTML page."""
