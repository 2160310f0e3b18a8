"""Lab: losing a node."""
