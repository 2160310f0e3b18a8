"""Run history in the run folder: state, timeline, failure records and root cause."""
