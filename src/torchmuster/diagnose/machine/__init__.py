"""Checks of this machine, one file for each subject."""
