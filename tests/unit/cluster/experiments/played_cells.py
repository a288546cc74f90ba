"""Cells and runs as experiments would leave them, with figures that can be worked out by hand."""

from typing import Any

from cluster.experiments.cells import Cell, CellKey
from cluster.experiments.samples import Sample, Spread
from cluster.experiments.scale_out import ReplicasRun
from cluster.experiments.settings import Mode


def cell(
    mode: Mode,
    *,
    figure: str = "fig5a",
    trace: str = "structured",
    kv_share: float = 0.5,
    concurrency: int | None = None,
    number: int = 0,
    tokens_per_s: float = 100.0,
    latency_s: float = 2.0,
    **values: Any,
) -> Cell:
    key = CellKey(
        figure=figure,
        trace=trace,
        mode=mode,
        kv_share=kv_share,
        concurrency=concurrency,
        round=number,
    )
    defaults: dict[str, Any] = {
        "key": key,
        "kv_capacity_tokens": 1000,
        "max_requests": 8,
        "token_time_s": None,
        "answers": 4,
        "text_tokens": 400,
        "wall_s": 4.0,
        "kept_samples": 3,
        "throughput": Spread(tokens_per_s, tokens_per_s - 1, tokens_per_s + 1),
        "overall_tokens_per_s": 100.0,
        "kv_tokens": 400.0,
        "rows": 3.0,
        "latency_s": Spread(latency_s, latency_s, latency_s),
        "token_latency_s": 0.02,
        "steps": 80,
        "computed_tokens": 600,
        "preemptions": 0,
        "forks": 0,
        "forks_delayed": 0,
        "categories": {},
        "samples": (Sample(3.0, 100.0, 400.0, 3.0, True),),
    }
    return Cell(**{**defaults, **values})


def replicas_run(replicas: int, *, forked: bool, tokens: int) -> ReplicasRun:
    return ReplicasRun(
        replicas=replicas,
        forked=forked,
        text_tokens=tokens,
        duration_s=10.0,
        latency_mean_s=1.0,
        server_cpu_s=12.0,
        client_cpu_s=3.0,
    )
