"""Lab: mixed precision."""
