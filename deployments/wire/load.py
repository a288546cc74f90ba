"""A replica's load report, which Ray Serve carries to the routers."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from deployments.wire.handshake import PROTOCOL


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of one replica at `taken_at_s`, its own clock (`time.time`).

    `requests` counts calls inside the replica, as its cap does; one call may ask for several
    choices. `threads` are alive, running or waiting in the engine. `waiting_forks` are children
    held back by a cap or by the fork policy. `blocks` and `free_blocks` count KV cache blocks of
    `block_size` tokens. `tokens_per_s` is the decode rate of all threads together over the last
    seconds, idle time excluded. `step_s` is the mean time of an engine step, 0 while unknown. So
    `tokens_per_s * step_s` is the mean number of threads in a step. `thread_weight` is what a
    thread beside others of its request costs over a request's first thread: 1, or less with family
    attention. `address` is where the replica takes calls of gateways (`wire/frames.py`), and
    `protocol` is their version.
    """

    requests: int
    threads: int
    waiting_forks: int
    blocks: int
    free_blocks: int
    block_size: int
    tokens_per_s: float
    step_s: float
    taken_at_s: float
    thread_weight: float = 1.0
    address: str | None = None
    protocol: int = PROTOCOL

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> "ReplicaLoad | None":
        """Read a report received through Ray Serve; None if empty or from another version."""
        if stats.keys() != {field.name for field in fields(cls)}:
            return None
        return cls(**stats)
