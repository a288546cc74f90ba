"""Kubernetes: the manifests, and what of them is made of the code."""
