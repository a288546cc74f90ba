"""Metrics of the gateway's and the replicas' processes, on their way to Prometheus.

Each process keeps plain numbers (`recorder.py`) and hands them, once a second, to Ray's metrics;
Ray brings those of all processes of a node to its agent, which Prometheus reads at `/metrics`.

How Prometheus finds the agents:

- A private cluster (`apar serve`) has one node, on loopback, with the port `metrics.port` (9464).
  Where another port is taken, or the nodes are many, `metrics.targets_file` names a file that
  `apar serve` keeps up to date for `file_sd_configs`.
- A cluster of the user's tells its nodes at `http://HEAD:8265/api/prometheus/sd`, for
  `http_sd_configs`, and in `/tmp/ray/prom_metrics_service_discovery.json` on its head. The port on
  each node is that of `ray start --metrics-export-port`; without it each has another one, which
  both lists know.
- On Kubernetes the operator's PodMonitors select the pods, whose containers name the port.
"""
