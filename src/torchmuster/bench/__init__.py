"""Benchmarks of hosts and trainings, their records and reports."""
