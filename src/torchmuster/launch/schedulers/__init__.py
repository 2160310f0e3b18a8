"""Slurm and Kubernetes."""
