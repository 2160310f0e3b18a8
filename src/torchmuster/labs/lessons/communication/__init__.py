"""Lab: set-up and communication."""
