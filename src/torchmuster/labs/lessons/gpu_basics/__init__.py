"""Lab: GPU basics and profiling."""
