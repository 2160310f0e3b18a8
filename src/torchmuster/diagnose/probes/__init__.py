"""Small torch programs that run as ranks."""
