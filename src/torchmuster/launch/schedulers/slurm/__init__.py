"""Slurm: render, submit and follow job scripts, and run inside an allocation.

See README.md in this folder.
"""
