"""Load reports and hints for the routing tests."""

from dataclasses import replace

from deployments.wire.load import ReplicaLoad
from deployments.wire.request import RequestHint
from deployments.wire.response import ResponseEnd

IDLE = ReplicaLoad(
    requests=0,
    threads=0,
    waiting_forks=0,
    blocks=10_000,
    free_blocks=10_000,
    block_size=16,
    tokens_per_s=0.0,
    step_s=0.0,
    taken_at_s=0.0,
)
HINT = RequestHint(prompt_tokens=64)
FORKED = ResponseEnd(
    prompt_tokens=64, generated_tokens=800, threads=8, forks=7, critical_path_tokens=100
)
PLAIN = ResponseEnd(
    prompt_tokens=64, generated_tokens=100, threads=1, forks=0, critical_path_tokens=100
)


def busy(requests: int, threads: int, *, step_s: float = 0.0, at_s: float = 0.0) -> ReplicaLoad:
    """Report of a replica with this load and a mostly empty cache."""
    rate = threads / step_s if step_s else 0.0
    return replace(
        IDLE,
        requests=requests,
        threads=threads,
        tokens_per_s=rate,
        step_s=step_s,
        taken_at_s=at_s,
    )
