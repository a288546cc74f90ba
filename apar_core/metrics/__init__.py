"""Metrics of an engine, and what counts them with prometheus_client."""
