"""A terminal view of a running cluster, from its metrics pages or from Prometheus."""
