"""Lab: memory."""
