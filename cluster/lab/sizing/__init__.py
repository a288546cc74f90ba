"""Cluster size for a given load: memory, step times, queueing."""
