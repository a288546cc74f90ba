"""What the gateway's work and the router add to a request, and where its time goes.

Two applications stand side by side on one Ray cluster, each with one replica of the same model: the
whole one (keys, rates, fair queue, router by threads, journals for continuation) and a bare relay
that hands each request to its replica through an ordinary Ray Serve handle. In every round one
after the other is measured, so that a change of the machine's speed meets both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.http_load import Endpoint
from benchmarks.http_rounds import (
    MODES,
    NUM_CLIENTS,
    NUM_TOKENS,
    Target,
    median_cpu,
    ratio,
    run_rounds,
)
from cluster.config import ClusterConfig
from cluster.config.keys import KeyConfig, hash_of, new_token
from cluster.config.logging import LoggingConfig
from cluster.config.model import ModelConfig
from cluster.local_ray import free_port, local_ray

WHOLE, BARE = "gateway and router", "bare relay"


def config(folder: Path, key: str) -> ClusterConfig:
    """All that costs time at the gateway, none of it so tight that a request would wait."""
    model = ModelConfig(
        checkpoint="apar-tiny",
        max_concurrency=64,
        threads_per_request=1.0,
        cpu_threads=1,
        kv_cache_gib=0.5,
    )
    limited = KeyConfig(
        name="bench",
        hash=hash_of(key),
        requests_per_minute=10**6,
        tokens_per_minute=10**9,
        max_threads=10**4,
    )
    return ClusterConfig(
        port=free_port(),
        models=(model,),
        keys=(limited,),
        logging=LoggingConfig(folder=folder),
    )


@contextmanager
def bare_application(settings: ClusterConfig) -> Iterator[None]:
    """The bare relay and a replica of its own, beside the whole application."""
    from ray import serve

    from benchmarks.bare_relay import BARE_PREFIX, BareRelay
    from deployments.app.application import engine_arguments, replica_environment
    from deployments.replica.replica import Replica, ReplicaSettings

    [model] = settings.models
    environment = replica_environment(model, on_gpu=False)
    replica = serve.deployment(
        name="Replica-bare",
        max_ongoing_requests=model.requests_per_replica,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": environment}},
    )(Replica).bind(
        ReplicaSettings(
            model=model.preset.path,
            served_name=model.public_name,
            engine=engine_arguments(model, on_gpu=False),
            coalesce_s=model.coalesce_s,
        )
    )
    relay = serve.deployment(
        name="BareRelay", max_ongoing_requests=10**6, ray_actor_options={"num_cpus": 0}
    )(BareRelay).bind(replica)
    serve.run(relay, name="bare", route_prefix=BARE_PREFIX)
    try:
        yield
    finally:
        serve.delete("bare")


def stages(lines: list[dict[str, Any]], client_latency_s: float) -> dict[str, float]:
    """Median seconds of a request by stage, from the gateway's log lines and the client's time.

    Medians of differences, so they add up only nearly to the median of the whole.
    """

    def median(values: Iterator[float]) -> float:
        return float(statistics.median(values))

    return {
        "ingress": client_latency_s - median(line["total_s"] for line in lines),
        "admission": median(line["sent_s"] for line in lines),
        "router and calls": median(
            line["total_s"] - line["sent_s"] - line["replica_s"] for line in lines
        ),
        "replica": median(line["replica_s"] - line["engine_s"] for line in lines),
        "engine": median(line["engine_s"] for line in lines),
    }


def log_lines(folder: Path, *, streaming: bool) -> list[dict[str, Any]]:
    """The gateway's lines of answered requests of one kind."""
    lines = [json.loads(line) for file in folder.glob("*") for line in file.open()]
    return [
        line
        for line in lines
        if line.get("status") == 200 and line.get("stream") is streaming and line.get("engine_s")
    ]


def show(console: Console, mode: str, rounds: list[dict[str, Any]], by_stage: Any) -> None:
    """Print one mode's comparison."""
    table = Table(title=f"{mode}: {NUM_CLIENTS} clients, {NUM_TOKENS} tokens each, unforked")
    for column in ("", BARE, WHOLE, "ratio"):
        table.add_column(column, justify="left" if not column else "right")

    def medians(key: str, scale: float) -> list[str]:
        return [
            f"{statistics.median(row[mode][name][key] for row in rounds) * scale:.0f}"
            for name in (BARE, WHOLE)
        ]

    for title, key, scale in (
        ("latency p50, ms", "latency_p50_s", 1000.0),
        ("first byte p50, ms", "first_byte_p50_s", 1000.0),
        ("tokens/s", "tokens_per_s", 1.0),
    ):
        table.add_row(title, *medians(key, scale), f"{ratio(rounds, mode, key, WHOLE, BARE):.3f}")
    table.add_section()
    for stage, seconds in by_stage.items():
        table.add_row(f"{stage}, ms", "", f"{seconds * 1000:.1f}")
    table.add_section()
    cpu = {name: median_cpu(rounds, mode, name) for name in (BARE, WHOLE)}
    for purpose in cpu[WHOLE]:
        used = [cpu[name].get(purpose, 0.0) * 1000 for name in (BARE, WHOLE)]
        table.add_row(f"CPU ms per 1k tokens: {purpose}", *(f"{value:.0f}" for value in used))
    console.print(table)


def main() -> None:
    """Run the rounds, print the tables, keep the figures in out/cluster_cost.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests-each", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/cluster_cost.json"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    console, key = Console(), new_token()
    with tempfile.TemporaryDirectory() as folder, local_ray(num_cpus=os.cpu_count() or 1):
        from benchmarks.bare_relay import BARE_PREFIX
        from deployments.app.service import running

        settings = config(Path(folder), key)
        with running(settings), bare_application(settings):
            # Both applications run below the same Ray, so each one's figures are those of all;
            # while one is measured the other rests.
            processes = psutil.Process().children()
            targets = [
                Target(BARE, Endpoint(settings.port, BARE_PREFIX), processes),
                Target(WHOLE, Endpoint(settings.port, key=key), processes),
            ]
            rounds = run_rounds(targets, arguments.rounds, arguments.requests_each)
            by_stage = {
                mode: stages(
                    log_lines(Path(folder), streaming=streaming),
                    statistics.median(row[mode][WHOLE]["latency_p50_s"] for row in rounds),
                )
                for mode, streaming in MODES.items()
            }
    for mode in MODES:
        show(console, mode, rounds, by_stage[mode])
    summary = {mode: ratio(rounds, mode, "latency_p50_s", WHOLE, BARE) for mode in MODES}
    arguments.out.write_text(
        json.dumps({"latency_ratio": summary, "stages_s": by_stage, "rounds": rounds}, indent=2)
    )
    console.print(f"Written to {arguments.out}")


if __name__ == "__main__":
    main()
