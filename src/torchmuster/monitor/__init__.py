"""Metrics, alerts and views of a run: what is measured, who serves it, when somebody should look."""
