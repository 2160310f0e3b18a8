"""A plan on the terminal, as JSON, and as a page."""
