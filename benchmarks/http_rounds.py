"""Servers that stand side by side, each measured once in every round under the same load.

A change of the machine's speed meets all of them; what is compared is compared within a round.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import Any

import psutil
from rich.progress import track

from benchmarks.cpu_by_process import cpu_seconds
from benchmarks.http_load import Endpoint, run_load

NUM_CLIENTS = 32
NUM_TOKENS = 100
MODES = {"stream": True, "whole": False}


@dataclass(frozen=True)
class Target:
    """A server to measure, and the processes that make it up, without this one."""

    name: str
    endpoint: Endpoint
    roots: list[psutil.Process]


def measure(target: Target, *, streaming: bool, requests_each: int) -> dict[str, Any]:
    """One run against one target: tokens per second, latencies, CPU seconds per 1,000 tokens."""
    before, client_before = cpu_seconds(target.roots), time.process_time()
    result = asyncio.run(
        run_load(
            target.endpoint,
            num_clients=NUM_CLIENTS,
            requests_each=requests_each,
            num_tokens=NUM_TOKENS,
            streaming=streaming,
        )
    )
    after = cpu_seconds(target.roots)
    used = {purpose: seconds - before.get(purpose, 0.0) for purpose, seconds in after.items()}
    used["client"] = time.process_time() - client_before
    thousands = len(result.answers) * NUM_TOKENS / 1000
    latencies = sorted(answer.latency_s for answer in result.answers)
    return {
        "tokens_per_s": thousands * 1000 / result.wall_s,
        "latency_p50_s": statistics.median(latencies),
        "latency_p99_s": latencies[int(len(latencies) * 0.99)],
        "first_byte_p50_s": statistics.median(a.first_byte_s for a in result.answers),
        "events_per_answer": statistics.mean(a.num_events for a in result.answers),
        "cpu_s_per_1k_tokens": {name: value / thousands for name, value in used.items()},
    }


def run_rounds(targets: list[Target], rounds: int, requests_each: int) -> list[dict[str, Any]]:
    """Every target in both modes, once a round; the order turns round by round.

    Returns, for each round, what `measure` gave, by mode and by the target's name.
    """
    for target in targets:
        for streaming in MODES.values():
            measure(target, streaming=streaming, requests_each=1)
    results = []
    for index in track(range(rounds), description="rounds"):
        order = targets if index % 2 == 0 else targets[::-1]
        results.append(
            {
                mode: {
                    target.name: measure(target, streaming=streaming, requests_each=requests_each)
                    for target in order
                }
                for mode, streaming in MODES.items()
            }
        )
    return results


def ratio(rounds: list[dict[str, Any]], mode: str, key: str, name: str, base: str) -> float:
    """Median over the rounds of one target's figure by another's within a round."""
    return float(statistics.median(row[mode][name][key] / row[mode][base][key] for row in rounds))


def median_cpu(rounds: list[dict[str, Any]], mode: str, name: str) -> dict[str, float]:
    """CPU seconds per 1,000 tokens of a target by purpose, medians over the rounds."""
    each = [row[mode][name]["cpu_s_per_1k_tokens"] for row in rounds]
    purposes = sorted({purpose for used in each for purpose in used})
    return {p: float(statistics.median(used.get(p, 0.0) for used in each)) for p in purposes}
