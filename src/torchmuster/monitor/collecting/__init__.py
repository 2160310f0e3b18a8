"""Collect samples from a host and its run folders."""
