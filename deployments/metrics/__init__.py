"""Metrics on their way from a process to Prometheus.

Each process keeps plain numbers (`recorder.py`) and passes them to Ray's metrics once a second. The
Ray agent of a node collects them from all its processes, and Prometheus scrapes the agent at
`/metrics`. `gateway/gateway_metrics.py` and `replica/replica_metrics.py` do the counting;
`cluster/metrics/catalogue.py` declares every metric.

How Prometheus finds the agents:

- A private cluster (`apar serve`) has one node, on loopback, with the port `metrics.port` (9464).
  If another port is in use, or there are many nodes, `metrics.targets_file` names a file for
  `file_sd_configs` that `apar serve` keeps up to date.
- Your own Ray cluster lists its nodes at `http://HEAD:8265/api/prometheus/sd`, for
  `http_sd_configs`, and in `/tmp/ray/prom_metrics_service_discovery.json` on its head. The port of
  each node is set by `ray start --metrics-export-port`; without it, each node takes a free one,
  and both lists name it.
- On Kubernetes the operator's PodMonitors select the pods, whose containers name the port.
"""
