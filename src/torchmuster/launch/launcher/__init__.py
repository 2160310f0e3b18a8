"""The process that the user started: connects nodes, starts ranks, watches, restarts."""
