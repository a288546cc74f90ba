"""Cost of metrics: throughput and CPU of `apar serve` with them, read as usual, and without.

Two servers of the same model; one stands still (SIGSTOP) while the other is measured, in every
round one after the other. With metrics means all that it brings: our counts and vLLM's, their
reports to Ray's agent, Ray's own metrics, and a reader that asks the agent every few seconds.
Without means that Ray collects none, and vLLM counts for nobody, as it does by itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.http_load import Endpoint
from benchmarks.http_rounds import MODES, Target, measure, median_cpu, ratio
from cluster.local_ray import free_port

ON, OFF = "with metrics", "without"
MAIN = "import typer; from cluster.cli.serve import serve; typer.run(serve)"
START_S = 180.0


@dataclass(frozen=True)
class Server:
    """An `apar serve` to measure, and where its metrics are read; None where it has none."""

    target: Target
    page: str | None

    def processes(self) -> list[psutil.Process]:
        """All that it consists of."""
        [root] = self.target.roots
        return [root, *root.children(recursive=True)]

    def stand_still(self) -> None:
        """Take no processor time until `go_on`."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def go_on(self) -> None:
        """Run again."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.resume()


def config(port: int, *, enabled: bool) -> dict[str, Any]:
    """The same server but for its metrics."""
    model = {
        "checkpoint": "apar-tiny",
        "max_concurrency": 64,
        "threads_per_request": 1.0,
        "cpu_threads": 1,
        "kv_cache_gib": 0.25,
    }
    metrics = {"port": 0} if enabled else {"enabled": False}
    return {"port": port, "models": [model], "metrics": metrics}


@contextmanager
def serving(name: str, folder: Path, *, enabled: bool) -> Iterator[Server]:
    """The server, once it is ready."""
    port, file, log = free_port(), folder / f"{enabled}.yaml", folder / f"{enabled}.log"
    file.write_text(yaml.safe_dump(config(port, enabled=enabled)))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "--config", str(file)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    root = psutil.Process(process.pid)
    server = Server(Target(name, Endpoint(port), [root]), None)
    try:
        deadline = time.monotonic() + START_S
        while "Press Ctrl-C to stop" not in (said := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {said}")
            time.sleep(0.5)
        page = said.partition("Metrics for Prometheus: ")[2].split()[0] if enabled else None
        yield Server(server.target, page)
    finally:
        server.go_on()
        process.terminate()
        process.wait(timeout=60)


@contextmanager
def read_every(page: str | None, seconds: float) -> Iterator[None]:
    """Read the page again and again, as Prometheus does; a reading that fails is an error."""
    ended = threading.Event()

    def read() -> None:
        while page is not None and not ended.wait(seconds):
            httpx.get(page, timeout=60).raise_for_status()

    with ThreadPoolExecutor(max_workers=1) as executor:
        reading = executor.submit(read)
        try:
            yield
        finally:
            ended.set()
        reading.result()


def run(servers: list[Server], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Each server in both modes, once a round, alone; the order turns round by round."""
    for server in servers:
        server.stand_still()
    results: list[dict[str, Any]] = []
    for index in track(range(arguments.rounds + 1), description="rounds"):
        row: dict[str, Any] = {mode: {} for mode in MODES}
        for server in servers if index % 2 == 0 else servers[::-1]:
            server.go_on()
            with read_every(server.page, arguments.read_s):
                for mode, streaming in MODES.items():
                    row[mode][server.target.name] = measure(
                        server.target, streaming=streaming, requests_each=arguments.requests_each
                    )
            server.stand_still()
        results.append(row)
    return results[1:]  # The first round warms up.


def spread(rounds: list[dict[str, Any]], mode: str) -> list[float]:
    """The ratio of throughputs in each round, sorted."""
    return sorted(row[mode][ON]["tokens_per_s"] / row[mode][OFF]["tokens_per_s"] for row in rounds)


def show(console: Console, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the comparison; returns what it shows."""
    table = Table(title="metrics: medians over the rounds")
    for column in ("", OFF, ON, "ratio", "rounds from", "to"):
        table.add_column(column, justify="right" if column else "left")
    summary: dict[str, Any] = {}
    for mode in MODES:
        each = spread(rounds, mode)
        values = [
            statistics.median(row[mode][name]["tokens_per_s"] for row in rounds)
            for name in (OFF, ON)
        ]
        throughput = ratio(rounds, mode, "tokens_per_s", ON, OFF)
        table.add_row(
            f"tokens/s, {mode}",
            *(f"{value:.0f}" for value in values),
            *(f"{value:.3f}" for value in (throughput, each[0], each[-1])),
        )
        cpu = {name: median_cpu(rounds, mode, name) for name in (OFF, ON)}
        for purpose in sorted({*cpu[OFF], *cpu[ON]}):
            used = [cpu[name].get(purpose, 0.0) * 1000 for name in (OFF, ON)]
            table.add_row(f"CPU ms per 1k tokens: {purpose}", *(f"{v:.0f}" for v in used))
        totals = [sum(cpu[name].values()) * 1000 for name in (OFF, ON)]
        table.add_row(
            "CPU ms per 1k tokens: all",
            *(f"{total:.0f}" for total in totals),
            f"{totals[1] / totals[0]:.3f}",
        )
        table.add_section()
        summary[mode] = {"throughput_ratio": throughput, "by_round": each, "cpu_s": cpu}
    console.print(table)
    return summary


def main() -> None:
    """Run the rounds, print the table, keep the figures in out/metrics_cost.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests-each", type=int, default=5)
    parser.add_argument("--read-s", type=float, default=15.0, help="pause between two readings")
    parser.add_argument("--out", type=Path, default=Path("out/metrics_cost.json"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = [
            stack.enter_context(serving(name, Path(folder), enabled=name == ON))
            for name in (OFF, ON)
        ]
        rounds = run(servers, arguments)
    summary = show(console, rounds)
    arguments.out.write_text(json.dumps({"summary": summary, "rounds": rounds}, indent=2))
    console.print(f"Written to {arguments.out}")


if __name__ == "__main__":
    main()
