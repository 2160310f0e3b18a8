"""Metrics, alerts and views of runs."""
