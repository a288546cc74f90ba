"""Calls to replicas, retries, and continuation of streams whose replica was lost."""
