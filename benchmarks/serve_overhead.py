"""Cost of the Ray Serve path against vLLM's own HTTP server, on ordinary (unforked) traffic.

Both serve the same model with the same engine arguments and stand side by side; in every round
one after the other is measured, so that a change of the machine's speed meets both. The ratio is
taken within a round, and its median over the rounds is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
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
from cluster.config.model import ModelConfig
from cluster.local_ray import free_port, local_ray

BARE, SERVE = "vLLM's own server", "apar serve"
ENTRY = "vllm.entrypoints.launchers.api_server.entry"


def config(arguments: argparse.Namespace) -> ClusterConfig:
    model = ModelConfig(
        checkpoint=arguments.model,
        max_concurrency=64,
        threads_per_request=1.0,
        cpu_threads=1,
        kv_cache_gib=0.5,
        coalesce_s=arguments.coalesce_s,
        engine={"enforce_eager": False} if arguments.compiled else {},
    )
    return ClusterConfig(port=free_port(), models=(model,))


@contextmanager
def bare_server(settings: ClusterConfig) -> Iterator[Target]:
    """vLLM's own server with the engine arguments that `apar serve` uses."""
    from deployments.app.application import engine_arguments, replica_environment

    port = free_port()
    [model] = settings.models
    command = [sys.executable, "-m", ENTRY, "--model", model.preset.path]
    command += ["--served-model-name", model.public_name, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--disable-uvicorn-access-log"]
    for name, value in engine_arguments(model, on_gpu=False).items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [] if value is False else [flag, str(value)]
    log = Path("out/serve_overhead_vllm.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | replica_environment(model, on_gpu=False),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until_healthy(port, process, log)
        yield Target(BARE, Endpoint(port), [psutil.Process(process.pid)])
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM's server did not start; see {log}")


@contextmanager
def serve_application(settings: ClusterConfig) -> Iterator[Target]:
    """The application on the private Ray cluster, which is running."""
    from deployments.app.service import running

    ray_processes = psutil.Process().children()
    with running(settings):
        yield Target(SERVE, Endpoint(settings.port), ray_processes)


def summarise(rounds: list[dict[str, Any]], mode: str) -> dict[str, Any]:
    """Medians over the rounds, and the median ratio of the two targets within a round."""

    def by_bare(key: str) -> float:
        return ratio(rounds, mode, key, SERVE, BARE)

    medians = {
        target: {
            key: statistics.median(row[mode][target][key] for row in rounds)
            for key, value in rounds[0][mode][target].items()
            if isinstance(value, float | int)
        }
        | {"cpu_s_per_1k_tokens": median_cpu(rounds, mode, target)}
        for target in (BARE, SERVE)
    }
    return {
        "throughput_ratio": by_bare("tokens_per_s"),
        "latency_ratio": by_bare("latency_p50_s"),
        "first_byte_ratio": by_bare("first_byte_p50_s"),
        "median": medians,
    }


def show(console: Console, mode: str, summary: dict[str, Any]) -> None:
    table = Table(title=f"{mode}: {NUM_CLIENTS} clients, {NUM_TOKENS} tokens each, unforked")
    for column in ("", BARE, SERVE, "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    median = summary["median"]
    rows = (
        ("tokens/s", "tokens_per_s", "throughput_ratio", 1),
        ("latency p50, ms", "latency_p50_s", "latency_ratio", 1000),
        ("first byte p50, ms", "first_byte_p50_s", "first_byte_ratio", 1000),
        ("events per answer", "events_per_answer", None, 1),
    )
    for title, key, compared, scale in rows:
        values = [f"{median[target][key] * scale:.0f}" for target in (BARE, SERVE)]
        table.add_row(title, *values, f"{summary[compared]:.3f}" if compared else "")
    table.add_section()
    cpu = {target: median[target]["cpu_s_per_1k_tokens"] for target in (BARE, SERVE)}
    for name in cpu[SERVE]:
        values = [f"{cpu[target].get(name, 0.0) * 1000:.0f}" for target in (BARE, SERVE)]
        table.add_row(f"CPU ms per 1k tokens: {name}", *values)
    totals = [sum(cpu[target].values()) for target in (BARE, SERVE)]
    table.add_row(
        "CPU ms per 1k tokens: all",
        *(f"{total * 1000:.0f}" for total in totals),
        f"{totals[1] / totals[0]:.3f}",
    )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="apar-tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests-each", type=int, default=5)
    parser.add_argument("--coalesce-s", type=float, default=0.05)
    parser.add_argument("--compiled", action="store_true", help="compile the model")
    parser.add_argument("--out", type=Path, default=Path("out/serve_overhead.json"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    settings = config(arguments)
    # Ray's daemons run in all measurements alike; they are the application's in the CPU figures.
    with (
        local_ray(num_cpus=os.cpu_count() or 1),
        serve_application(settings) as application,
        bare_server(settings) as bare,
    ):
        rounds = run_rounds([bare, application], arguments.rounds, arguments.requests_each)
    summaries = {mode: summarise(rounds, mode) for mode in MODES}
    for mode, summary in summaries.items():
        show(console, mode, summary)
    arguments.out.write_text(json.dumps({"summary": summaries, "rounds": rounds}, indent=2))
    console.print(f"Written to {arguments.out}")


if __name__ == "__main__":
    main()
