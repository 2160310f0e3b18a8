"""The process that the user started: connects hosts, starts, monitors and restarts ranks."""
