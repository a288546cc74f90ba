"""Dashboards and alerts of a cluster: files, and the code that makes them."""
