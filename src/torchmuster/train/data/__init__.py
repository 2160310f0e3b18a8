"""Data loading: which samples each rank reads, in which order, and its position."""
