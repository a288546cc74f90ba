"""What a fork costs, beside the same forks through ordinary prefix caching.

Prefix caching is what clients lean on that fork by sending completions again: each child looks for
its prefix in the cache, which holds whole blocks only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from apar_core.errors import EngineError, EvaluationError
from apar_core.reporting import Column, ReportTable
from cluster.experiments.program import Submission

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.scheduler.block_sharing import BlockSharing, ForkCounters

SHARED, CACHED = "block sharing (ours)", "prefix caching (client-side)"


def fork_costs(engine: OfflineEngine, submissions: Sequence[Submission]) -> dict[str, ForkCounters]:
    """Generate the answers both ways, and return what their forks cost by the way.

    Raises EvaluationError if none of them forks.
    """
    sharing: BlockSharing = engine.scheduler.block_sharing
    shared = _counters(engine, submissions)
    sharing.enabled = False
    try:
        cached = _counters(engine, submissions)
    finally:
        sharing.enabled = True
    if shared.forks == 0:
        raise EvaluationError(f"none of {len(submissions)} answers forks")
    return {SHARED: shared, CACHED: cached}


def fork_cost_table(costs: Mapping[str, ForkCounters], block_size: int) -> ReportTable:
    """Return tokens computed and blocks copied per fork, and prompt tokens that were shared."""
    columns = (
        Column("way"),
        Column("tokens computed per fork", ".2f"),
        Column("blocks copied per fork", ".2f"),
        Column("tokens shared per fork", ".1f"),
        Column("without KV to share", ".0f"),
    )
    rows = tuple(
        (
            way,
            counters.computed_tokens / counters.forks,
            counters.copied_blocks / counters.forks,
            counters.shared_tokens / counters.forks,
            counters.fallbacks,
        )
        for way, counters in costs.items()
    )
    forks = costs[SHARED].forks
    return ReportTable(
        "fork-cost", f"Cost of a fork: {forks} forks, blocks of {block_size} tokens", columns, rows
    )


def _counters(engine: OfflineEngine, submissions: Sequence[Submission]) -> ForkCounters:
    # Imports vLLM, which takes seconds.
    from apar_core.scheduler.block_sharing import ForkCounters

    sharing: BlockSharing = engine.scheduler.block_sharing
    if not engine.scheduler.reset_prefix_cache():
        raise EngineError("the prefix cache was not reset: blocks of an earlier run are held")
    sharing.counters = ForkCounters()
    prompts = [{"prompt_token_ids": each.prompt_ids} for each in submissions]
    engine.generate(prompts, [each.sampling for each in submissions])
    return sharing.counters
