"""Requests and their threads on their way through a simulated replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from apar_core.scheduler.thread_table import ThreadGroup
from benchmarks.cluster_simulation.blocks import Segment
from benchmarks.cluster_simulation.trees import AnswerTree, ThreadPlan
from deployments.wire.request import RequestHint


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of the workload; what its router may know of it is in `hint`."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    tree: AnswerTree
    hint: RequestHint
    pieces: tuple[tuple[int, int], ...] = ()
    """(hash of the prompt up to a piece's end, tokens up to there): system prompt, turns."""


@dataclass(slots=True)
class Outcome:
    """What became of a request; times in seconds since the start, None while not reached."""

    request: SimRequest
    sent_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    replica_id: str | None = None
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True, eq=False)
class Thread:
    """One thread of a request, as an engine's sequence.

    `length` counts the tokens of its sequence while it waits or is prefilled; in the batch it is
    `offset` + the replica's step. `generated` likewise, up to when it joined the batch.
    `order` sorts the waiting ones: what has begun first, then the order of arrival.
    """

    family: Family
    index: int
    plan: ThreadPlan
    segment: Segment
    length: int
    order: tuple[bool, int, int]
    generated: int = 0
    prefill_left: int = 0
    offset: int = 0
    base: int = 0
    """The step at which `generated` tokens were there."""
    next_fork: int = 0
    epoch: int = 0
    fresh: bool = True

    def event_step(self) -> int:
        """The step after which the thread forks or ends."""
        forks = self.plan.forks
        event = forks[self.next_fork][0] if self.next_fork < len(forks) else self.plan.num_tokens
        return self.base + event - self.generated

    def __lt__(self, other: Thread) -> bool:
        return self.order < other.order


@dataclass(slots=True, eq=False)
class Family:
    """The threads of one request, and who waits for its end."""

    order: int
    outcome: Outcome
    on_end: Callable[[Outcome], None]
    group: ThreadGroup[Thread]
