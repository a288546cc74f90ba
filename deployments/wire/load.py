"""What a router knows of a request and of a replica; plain values, nothing of Ray or vLLM."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica reports of itself; `taken_at_s` is its clock's time (`time.time`).

    `requests` are calls inside the replica, which its cap counts, each with one choice or more.
    `threads` are alive, running or waiting in the engine; `waiting_forks` are children that a cap
    or the fork policy holds back; `blocks` and `free_blocks` are of `block_size` tokens of KV
    cache; `tokens_per_s` is the decode rate over the last seconds, all threads together, as long
    as there were any; `step_s` the mean time of an engine step, 0 while it is not known. So their
    product is the mean number of threads in a step.
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
