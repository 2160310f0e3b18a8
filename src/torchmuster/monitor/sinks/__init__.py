"""Sinks for a run's metrics: files for other programs, and experiment trackers."""
