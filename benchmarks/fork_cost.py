"""What a fork of the model's own answers costs; `apar experiment fork-cost` replays a trace."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from apar_core.engine.offline_engine import OfflineEngine
from benchmarks.decoding import forked_answers, replays
from cluster.cli.evaluation_progress import rich_table
from cluster.experiments.fork_cost import fork_cost_table, fork_costs
from cluster.experiments.program import Submission

NUM_ANSWERS = 32


def run(engine: OfflineEngine, console: Console) -> dict[str, Any]:
    """Print tokens computed and blocks copied per fork, both ways; returns plain values."""
    prompts, sampling = replays(forked_answers(engine, NUM_ANSWERS), as_threads=True)
    submissions = [
        Submission("answer", prompt["prompt_token_ids"], arguments)
        for prompt, arguments in zip(prompts, sampling, strict=True)
    ]
    costs = fork_costs(engine, submissions)
    console.print(rich_table(fork_cost_table(costs, engine.scheduler.block_size)))
    return {"fork_cost": {way: asdict(counters) for way, counters in costs.items()}}
