"""Measuring what a machine and a training reach: benches, records of them, and what to make of both."""
