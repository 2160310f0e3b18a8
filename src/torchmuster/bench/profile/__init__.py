"""Profiling: record and analyse the time breakdown of a training, and advise on it."""
