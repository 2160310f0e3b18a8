"""A job as manifests for Kubernetes. See README.md in this folder."""
