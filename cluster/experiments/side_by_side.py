"""What runs that are compared need before they are done side by side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from cluster.experiments.driver import RunPlan, drive
from cluster.experiments.experiment_engine import ExperimentEngine
from cluster.experiments.settings import ExperimentSettings

_LEARNING_ANSWERS = 8

Key = TypeVar("Key")


def unfinished_groups(
    keys: Sequence[Key],
    size: int,
    point: Callable[[Key], Hashable],
    is_done: Callable[[Key], bool],
) -> Iterator[tuple[Key, ...]]:
    """Return keys in groups of at most `size` that are of one point, which follow each other.

    What is side by side is done again as a whole if a part of it is missing.
    """
    for _, of_point in groupby(keys, point):
        same = tuple(of_point)
        for start in range(0, len(same), size):
            group = same[start : start + size]
            if not all(is_done(key) for key in group):
                yield group


def plans_of(
    keys: Sequence[Key],
    engines: Sequence[ExperimentEngine],
    plan_of: Callable[[Key, ExperimentEngine], RunPlan],
    on_answer: Callable[[], None],
) -> list[RunPlan]:
    """Return the plans of a group, each in its own engine."""
    return [
        replace(plan_of(key, engine), on_answer=on_answer)
        for key, engine in zip(keys, engines, strict=False)
    ]


def with_learned_steps(
    plan: RunPlan,
    sequential: RunPlan,
    settings: ExperimentSettings,
    *,
    step_s: float | None,
) -> RunPlan:
    """Let an adaptive policy learn the times of steps where it is measured, as a server's has after
    its start; return the plan of what is measured.

    It keeps to a multiple of the mean step of sequential decoding a token. `step_s` is that step in
    seconds; None: it is measured just before, with the first answers of the `sequential` plan under
    the same conditions.
    """
    sample_s = settings.sample_s
    if step_s is None:
        flat = replace(sequential, conditions=replace(plan.conditions, policy="eager"))
        run = drive(_first_answers(flat), sample_s=sample_s)
        step_s = run.wall_s / run.counts.steps
    token_time_s = settings.token_time_multiple * step_s
    conditions = replace(plan.conditions, token_time_s=token_time_s)
    drive(_first_answers(replace(plan, conditions=conditions)), sample_s=sample_s)
    return replace(plan, conditions=replace(conditions, keeps_learned=True))


def _first_answers(plan: RunPlan) -> RunPlan:
    """As many that the limit on requests is reached for a while."""
    limit = plan.conditions.concurrency or plan.conditions.max_requests or 0
    number = min(max(_LEARNING_ANSWERS, 2 * limit), plan.num_questions)
    return replace(plan, num_questions=number, on_answer=lambda: None)
