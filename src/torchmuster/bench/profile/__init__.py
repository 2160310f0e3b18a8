"""Profiling: record and analyse the time breakdown of a training run, and advise on it."""
