"""Steps between two configurations."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.app.service import changes, check_change, steps
from deployments.config import ClusterConfig, ConfigError
from deployments.config.model import ModelConfig


def config(*models: ModelConfig | str, **fields: Any) -> ClusterConfig:
    known = [ModelConfig(name=model) if isinstance(model, str) else model for model in models]
    return ClusterConfig(models=tuple(known), **fields)


def names(cluster: ClusterConfig) -> list[str]:
    return [model.public_name for model in cluster.models]


def walk(old: ClusterConfig, new: ClusterConfig) -> list[tuple[list[str], list[str]]]:
    return [(names(step.replicas), names(step.served)) for step in steps(old, new)]


def test_an_unchanged_configuration_needs_no_step() -> None:
    assert walk(config("a", "b"), config("a", "b")) == []


def test_a_new_model_is_offered_once_its_replicas_run() -> None:
    assert walk(config("a"), config("a", "b")) == [
        (["a", "b"], ["a"]),
        (["a", "b"], ["a", "b"]),
    ]


def test_a_removed_model_loses_its_replicas_after_it_is_no_longer_offered() -> None:
    assert walk(config("a", "b"), config("b")) == [(["a", "b"], ["b"]), (["b"], ["b"])]


def test_changed_limits_take_one_step() -> None:
    old, new = config("a"), config("a", drain_s=5)

    (step,) = steps(old, new)

    assert step.replicas == step.served == new


NAMES = st.lists(st.sampled_from("abcd"), min_size=1, unique=True)


@given(NAMES, NAMES)
def test_every_offered_model_has_replicas_before_during_and_after_each_step(
    before: list[str], after: list[str]
) -> None:
    old, new = config(*before), config(*after)
    replicas, offered = set(before), before
    for step_replicas, step_offered in walk(old, new):
        # Within a step, the gateway and the replicas change in any order.
        assert {*offered, *step_offered} <= replicas & set(step_replicas)
        replicas, offered = set(step_replicas), step_offered

    assert (replicas, offered) == (set(after), after)


@pytest.mark.parametrize(("field", "value"), [("port", 9000), ("ray_address", "auto")])
def test_the_address_cannot_be_changed(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field}: cannot be changed"):
        check_change(config("a"), config("a", **{field: value}))


def test_changes_are_described_by_model_and_field() -> None:
    old = config("a", ModelConfig(name="b", replicas=1))
    new = config(ModelConfig(name="b", replicas=2, coalesce_s=0), "c", drain_s=1)

    assert changes(old, new) == [
        "model c is added",
        "model a is removed",
        "model b is changed: replicas, coalesce_s",
        "drain_s is changed",
    ]
