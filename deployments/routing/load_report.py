"""A replica's report to the routers, from what its engine core says of itself."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from deployments.routing.views import ReplicaLoad

# Rates are of the last so many seconds: long enough for a mean, short enough to follow a load.
WINDOW_S = 2.0
_FIELDS = frozenset(field.name for field in fields(ReplicaLoad))


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    num_steps: int
    num_rows: int
    busy_s: float


class LoadReporter:
    """Turns the engine core's counts into a report; rates come from the counts before."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._samples: deque[_Sample] = deque()

    def report(self, state: Mapping[str, Any], requests: int, now_s: float) -> ReplicaLoad:
        """The report for this moment, with so many requests inside the replica.

        `state` is the engine's `core_state`, whose own count of requests has each choice of an
        answer as one; what Ray Serve counts against a replica's cap is the calls.
        """
        steps = state.get("steps", {})
        sample = _Sample(
            now_s, steps.get("num_steps", 0), steps.get("num_rows", 0), steps.get("busy_s", 0.0)
        )
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at_s <= now_s - WINDOW_S:
            self._samples.popleft()
        oldest = self._samples[0]
        busy_s = sample.busy_s - oldest.busy_s
        num_steps = sample.num_steps - oldest.num_steps
        return ReplicaLoad(
            requests=requests,
            threads=state["threads"],
            waiting_forks=state.get("deferred_threads", 0),
            blocks=state["kv_blocks"],
            free_blocks=state["free_blocks"],
            block_size=self._block_size,
            tokens_per_s=(sample.num_rows - oldest.num_rows) / busy_s if busy_s > 0 else 0.0,
            step_s=busy_s / num_steps if num_steps else 0.0,
            taken_at_s=now_s,
        )


def load_from(stats: Mapping[str, Any]) -> ReplicaLoad | None:
    """The report that arrived through Ray Serve; None for nothing, or of another version."""
    if stats.keys() != _FIELDS:
        return None
    return ReplicaLoad(**stats)
