"""What each rank reads, in which order, and where it is in it."""
