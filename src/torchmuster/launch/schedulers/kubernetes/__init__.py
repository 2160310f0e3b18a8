"""Kubernetes manifests for a job. See README.md in this folder."""
