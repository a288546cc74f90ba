"""Counts over one run of an engine that the engine's own counts do not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.experiments.experiment_engine import ExperimentEngine


@dataclass(slots=True)
class RunWatch:
    """`sequences` are requests and threads, `generated_tokens` all theirs, control and end tokens
    included; `peak_kv_tokens` the most that held blocks had room for in any step.
    """

    sequences: int = 0
    generated_tokens: int = 0
    peak_kv_tokens: int = 0

    def prompt_tokens(self, computed_tokens: int) -> int:
        """Tokens computed that the engine had not generated just before: prompts, children's
        beginnings, and what a preemption made it compute again.
        """
        # A sequence's last token is not computed.
        return computed_tokens - (self.generated_tokens - self.sequences)


@contextmanager
def watched(engine: ExperimentEngine) -> Iterator[RunWatch]:
    """Count while the context lasts."""
    watch = RunWatch()
    scheduler: Any = engine.scheduler
    # Whatever wraps these two already is put back afterwards.
    schedule, add_request = scheduler.schedule, engine.llm_engine.add_request
    before = (scheduler.num_generated_tokens, scheduler.block_sharing.counters.forks)

    def watched_schedule(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        watch.peak_kv_tokens = max(watch.peak_kv_tokens, engine.kv_tokens_in_use)
        return step

    def watched_add(*args: Any, **kwargs: Any) -> Any:
        watch.sequences += 1
        return add_request(*args, **kwargs)

    scheduler.schedule = watched_schedule
    engine.llm_engine.add_request = watched_add
    try:
        yield watch
    finally:
        scheduler.schedule = schedule
        engine.llm_engine.add_request = add_request
        watch.generated_tokens = scheduler.num_generated_tokens - before[0]
        watch.sequences += scheduler.block_sharing.counters.forks - before[1]
