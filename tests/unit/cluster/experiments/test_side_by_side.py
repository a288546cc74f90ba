from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.experiments import side_by_side
from cluster.experiments.driver import RunPlan
from cluster.experiments.experiment_engine import Conditions, Policy
from cluster.experiments.settings import ExperimentSettings
from cluster.experiments.side_by_side import unfinished_groups, with_learned_steps

SETTINGS = ExperimentSettings(trace=Path("answers.jsonl"), token_time_multiple=2.0)


def test_a_group_is_of_one_point_and_no_larger_than_the_engines() -> None:
    keys = ["a1", "a2", "a3", "b1", "b2"]

    def grouped(size: int) -> list[tuple[str, ...]]:
        return list(unfinished_groups(keys, size, lambda key: key[0], lambda key: False))

    assert grouped(3) == [("a1", "a2", "a3"), ("b1", "b2")]
    assert grouped(2) == [("a1", "a2"), ("a3",), ("b1", "b2")]
    assert grouped(1) == [("a1",), ("a2",), ("a3",), ("b1",), ("b2",)]


def test_a_group_is_done_again_as_a_whole_if_a_part_of_it_is_missing() -> None:
    keys = ["a1", "a2", "b1", "b2"]
    done = {"a1", "a2", "b1"}

    def left(size: int) -> list[tuple[str, ...]]:
        return list(unfinished_groups(keys, size, lambda key: key[0], lambda key: key in done))

    assert left(2) == [("b1", "b2")]
    assert left(1) == [("b2",)]


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Conditions, int]]:
    """Name, conditions and number of the runs; each has 10 steps of 0.2 s."""
    found: list[tuple[str, Conditions, int]] = []

    def played(plan: RunPlan, *, sample_s: float) -> Any:
        plan.on_answer()
        found.append((str(plan.make), plan.conditions, plan.num_questions))
        return SimpleNamespace(wall_s=2.0, counts=SimpleNamespace(steps=10))

    monkeypatch.setattr(side_by_side, "drive", played)
    return found


def plan(name: str, policy: Policy, number: int = 20, limit: int = 4) -> RunPlan:
    """A plan whose program factory is only a name."""
    given: Any = {"engine": None, "make": name}
    conditions = Conditions(max_requests=limit, policy=policy)
    return RunPlan(conditions=conditions, num_questions=number, **given)


def test_the_adaptive_policy_keeps_to_a_multiple_of_a_step_that_is_measured_first(
    driven: list[tuple[str, Conditions, int]],
) -> None:
    ready = with_learned_steps(
        plan("forked", "adaptive"),
        plan("flat", "eager"),
        SETTINGS.model_copy(update={"token_time_multiple": 3.0}),
        step_s=None,
    )

    (flat, flat_conditions, few), (forked, learning, as_few) = driven
    assert (flat, few, forked, as_few) == ("flat", 8, "forked", 8)
    assert flat_conditions == Conditions(max_requests=4)
    assert learning.token_time_s == pytest.approx(3 * 2.0 / 10)
    assert not learning.keeps_learned
    assert ready.conditions == replace(learning, keeps_learned=True)
    assert ready.num_questions == 20


def test_a_step_that_is_known_is_not_measured_again_and_few_questions_are_enough(
    driven: list[tuple[str, Conditions, int]],
) -> None:
    ready = with_learned_steps(
        plan("forked", "adaptive", 3), plan("flat", "eager"), SETTINGS, step_s=0.5
    )

    assert [(name, number) for name, _, number in driven] == [("forked", 3)]
    assert ready.conditions.token_time_s == 1.0


def test_the_first_answers_are_enough_to_reach_the_limit_on_requests(
    driven: list[tuple[str, Conditions, int]],
) -> None:
    with_learned_steps(
        plan("forked", "adaptive", 96, limit=16),
        plan("flat", "eager", 96, limit=16),
        SETTINGS,
        step_s=None,
    )

    assert [number for _, _, number in driven] == [32, 32]
