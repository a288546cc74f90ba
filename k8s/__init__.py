"""Kubernetes manifests, and the generator of the PrometheusRule among them."""
