"""Metrics of the gateway's and the replicas' processes, on their way to Prometheus.

Each process keeps plain numbers (`recorder.py`) and hands them, once a second, to Ray's metrics;
Ray brings those of all processes of a node to its agent there, which Prometheus reads.
"""
