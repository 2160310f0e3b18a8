"""Lab: the production pipeline."""
