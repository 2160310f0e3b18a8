"""Benchmarks of hosts and training runs, their records and reports."""
