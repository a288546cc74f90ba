"""What the steps of the engine compute, as the fork policies see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from apar_core.scheduler.step_time_model import BatchView


def scheduled_batch(
    step: SchedulerOutput, requests: Mapping[str, Request], *, counts_attended: bool
) -> BatchView:
    """What a step computes; attended tokens are 0 where nobody asks for them."""
    rows = len(step.num_scheduled_tokens)
    attended = 0
    if counts_attended:
        attended = sum(requests[name].num_computed_tokens for name in step.num_scheduled_tokens)
    return BatchView(rows, attended, step.total_num_scheduled_tokens - rows)


def coming_batch(rows: int, running: Iterable[Request], *, counts_attended: bool) -> BatchView:
    """What the next steps will compute, as far as it is known, without prompts."""
    return BatchView(rows, sum(each.num_tokens for each in running) if counts_attended else 0)
