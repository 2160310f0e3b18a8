"""Lab: joining machines."""
