"""Workloads of load tests: recorded answers to generate again, and when their requests come."""
