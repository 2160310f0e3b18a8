"""Slurm: submit jobs, and run inside an allocation.

See README.md in this folder.
"""
