"""What a fork costs, beside the same forks through ordinary prefix caching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from apar_core.engine.offline import OfflineEngine
from apar_core.scheduler.block_sharing import BlockSharing, ForkCounters
from benchmarks.decoding import ForkedAnswer, forked_answers, replays

NUM_ANSWERS = 32


def run(engine: OfflineEngine, console: Console) -> dict[str, Any]:
    """Print tokens computed and blocks copied per fork, both ways; returns plain values."""
    answers = forked_answers(engine, NUM_ANSWERS)
    sharing: BlockSharing = engine.scheduler.block_sharing
    shared = _counters(engine, answers)
    # As clients do that fork by sending completions again: each child looks for its prefix in the
    # prefix cache, which holds whole blocks only.
    sharing.enabled = False
    try:
        cached = _counters(engine, answers)
    finally:
        sharing.enabled = True
    rows = {"block sharing (ours)": shared, "prefix caching (client-side)": cached}
    table = Table(title=f"Cost of a fork, {shared.forks} forks, blocks of {_block_size(engine)}")
    for name in ("way", "tokens computed per fork", "blocks copied per fork", "tokens shared"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for name, counters in rows.items():
        table.add_row(
            name,
            f"{counters.computed_tokens / counters.forks:.2f}",
            f"{counters.copied_blocks / counters.forks:.2f}",
            str(counters.shared_tokens),
        )
    console.print(table)
    return {"fork_cost": {name: asdict(counters) for name, counters in rows.items()}}


def _counters(engine: OfflineEngine, answers: Sequence[ForkedAnswer]) -> ForkCounters:
    sharing: BlockSharing = engine.scheduler.block_sharing
    engine.scheduler.reset_prefix_cache()
    sharing.counters = ForkCounters()
    prompts, sampling = replays(answers, as_threads=True)
    engine.generate(prompts, sampling)
    return sharing.counters


def _block_size(engine: OfflineEngine) -> int:
    block_size: int = engine.scheduler.block_size
    return block_size
