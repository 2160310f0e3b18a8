"""Where models come from, and what is done to them before they are spread over the ranks."""
