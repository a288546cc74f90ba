"""The catalogue as a page of documentation."""

from cluster.metrics.catalogue import Kind, Metric, metrics

_HEAD = """\
# Metrics

Made by `python -m cluster.metrics` from `cluster/metrics/catalogue.py`; do not edit.

Ray's agent on each node tells all of them at `/metrics`, beside Ray's own (`ray_...`) and vLLM's
(`ray_vllm_...`, of each replica, labelled `ReplicaId`). To the labels below Ray adds `WorkerId`,
`NodeAddress`, `SessionName` and others: each process has series of its own. Sum them over what you
do not ask for; of gauges that all gateways tell alike (`replicas`, `replicas_wanted`), take the
largest.

- Counters begin with 0 when their process starts, and stay when it has ended, until the agent of
  its node ends.
- A histogram is told as `_bucket`, `_sum` and `_count`, which Ray types as gauges: its own
  histograms would put each value in the middle of its bucket. They behave as a histogram's, and go
  with the gauges when the process ends.
- Numbers are handed over once a second, and reach the agent with the process' next report:
  `metrics.report_s` on a private cluster, 10 s on another (`RAY_metrics_report_interval_ms`). What
  a process that is killed had not reported is lost.
"""


def as_markdown() -> str:
    """All metrics: a table of them, then each with its meaning and what its labels hold."""
    rows = ["| Metric | Type | Unit | Labels |", "|---|---|---|---|", *map(_row, metrics())]
    table = "\n".join(rows) + "\n"
    return "\n".join([_HEAD, table, *(_section(metric) for metric in metrics())])


def _row(metric: Metric) -> str:
    labels = ", ".join(metric.labels)
    return f"| `{metric.exported}` | {metric.kind.value} | {metric.unit} | {labels} |"


def _section(metric: Metric) -> str:
    facts = f"{metric.kind.value.capitalize()}, in {metric.unit}."
    lines = [f"## `{metric.exported}`", "", f"{facts} {metric.help}", ""]
    lines += [f"- `{name}`: {values}" for name, values in metric.labels.items()]
    if metric.kind is Kind.HISTOGRAM:
        bounds = ", ".join(f"{bound:g}" for bound in metric.buckets)
        lines.append(f"- `le`: {bounds}, +Inf")
    return "\n".join([*lines, ""])
