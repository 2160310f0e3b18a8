"""Checks of one host, one file per subject."""
