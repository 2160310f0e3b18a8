"""Slurm: job scripts, submitting and following them, and running inside an allocation.

See README.md in this folder.
"""
