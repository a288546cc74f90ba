"""What runs that are compared need before they are done side by side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from cluster.experiments.driver import RunPlan, drive

_LEARNING_ANSWERS = 8

Key = TypeVar("Key")


def groups(
    keys: Sequence[Key], size: int, point: Callable[[Key], Hashable]
) -> Iterator[tuple[Key, ...]]:
    """Return keys in groups of at most `size` that are of one point, which follow each other."""
    for _, of_point in groupby(keys, point):
        same = tuple(of_point)
        for start in range(0, len(same), size):
            yield same[start : start + size]


def with_learned_steps(
    plan: RunPlan,
    sequential: RunPlan,
    *,
    step_s: float | None,
    multiple: float,
    sample_s: float,
) -> RunPlan:
    """Let an adaptive policy learn the times of steps where it is measured, as a server's has after
    its start; return the plan of what is measured.

    It keeps to a multiple of the mean step of sequential decoding a token. `step_s` is that step in
    seconds; None: it is measured just before, with the first answers of the `sequential` plan.
    """
    if step_s is None:
        run = drive(_first_answers(sequential), sample_s=sample_s)
        step_s = run.wall_s / run.counts.steps
    conditions = replace(plan.conditions, token_time_s=multiple * step_s)
    drive(_first_answers(replace(plan, conditions=conditions)), sample_s=sample_s)
    return replace(plan, conditions=replace(conditions, keeps_learned=True))


def _first_answers(plan: RunPlan) -> RunPlan:
    """As many that the limit on requests is reached for a while."""
    limit = plan.conditions.concurrency or plan.conditions.max_requests or 0
    number = min(max(_LEARNING_ANSWERS, 2 * limit), plan.num_questions)
    return replace(plan, num_questions=number, on_answer=lambda: None)
