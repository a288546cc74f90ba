"""Decisions of the autoscaler."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.autoscaling import ModelLoad, ReplicaReport, ScalingState, decide, replicas_worth
from deployments.config.autoscaling import AutoscalingConfig
from deployments.config.model import ModelConfig

SETTINGS = AutoscalingConfig(
    max_replicas=8, target_kv_use=0.8, upscale_delay_s=5, downscale_delay_s=60
)
TARGET_THREADS = 100.0
SETTLES_LATER = SETTINGS.model_copy(update={"catch_up_s": 0.0})


def report(**fields: float) -> ReplicaReport:
    values = {"requests": 10.0, "threads": 40.0, "waiting_forks": 0.0, "kv_use": 0.1} | fields
    return ReplicaReport(**values)


def load_of(*replicas: ReplicaReport, **fields: Any) -> ModelLoad:
    values = {"waiting_requests": 0.0, "default_threads": 4.0, "running": len(replicas)} | fields
    return ModelLoad(replicas=replicas, **({"target": len(replicas)} | values))


def decided(loads: list[ModelLoad], settings: AutoscalingConfig = SETTINGS) -> list[int]:
    """Decisions on loads one second apart."""
    state, decisions = ScalingState(), []
    for second, load in enumerate(loads):
        decision, state = decide(load, settings, TARGET_THREADS, state, float(second))
        decisions.append(decision)
    return decisions


def at_once(load: ModelLoad, **fields: Any) -> int:
    settings = SETTINGS.model_copy(update={"upscale_delay_s": 0, "downscale_delay_s": 0} | fields)
    return decided([load], settings)[0]


@pytest.mark.parametrize(
    ("load", "worth"),
    [
        (load_of(report(threads=150)), 1.5),
        (load_of(report(threads=100, waiting_forks=100)), 2.0),
        (load_of(report(threads=10, kv_use=0.9), report(threads=10, kv_use=0.7)), 2.0),
        # 10 requests have 40 threads, so 15 waiting requests add 60.
        (load_of(report(), waiting_requests=15), 1.0),
        # Twice the threads take twice the cache.
        (load_of(report(requests=1, threads=1, kv_use=0.8), waiting_requests=1), 2.0),
        (load_of(report(requests=0, threads=0, kv_use=0), waiting_requests=50), 2.0),
        (load_of(waiting_requests=1), 0.04),
    ],
)
def test_the_load_is_the_larger_of_threads_and_kv_cache(load: ModelLoad, worth: float) -> None:
    assert replicas_worth(load, SETTINGS, TARGET_THREADS) == pytest.approx(worth)


def test_scaling_up_waits_for_the_upscale_delay() -> None:
    busy = load_of(report(threads=150))

    assert decided([busy] * 7) == [1, 1, 1, 1, 1, 2, 1]
    calm = load_of(report(threads=50))
    assert decided([busy, busy, busy, calm, busy, busy, busy, busy]) == [1] * 8


def test_scaling_down_waits_and_keeps_the_most_wanted_meanwhile() -> None:
    calm = load_of(*[report(threads=10)] * 4)
    warm = load_of(*[report(threads=50)] * 4)

    assert decided([calm] * 61)[-2:] == [4, 2]
    assert decided([calm, warm, *[calm] * 59])[-1] == 3


def test_replicas_stay_if_the_others_would_lack_headroom() -> None:
    almost = load_of(report(threads=45), report(threads=45))

    assert at_once(almost) == 2
    assert at_once(almost, downscale_headroom=0.05) == 1


def test_a_load_at_the_target_changes_nothing() -> None:
    assert decided([load_of(report(threads=99), report(threads=99))] * 100) == [2] * 100


def test_growth_is_bounded_by_what_runs() -> None:
    flooded = load_of(report(threads=5000))

    assert at_once(flooded) == 2
    assert at_once(flooded, max_growth=4.0) == 4
    assert at_once(load_of(report(threads=5000), target=2)) == 2


def flooded(waiting: float, running: int = 2) -> ModelLoad:
    """Full replicas, each with four times its target load, and waiting requests."""
    return load_of(*[report(requests=100, threads=400)] * running, waiting_requests=waiting)


def test_no_scaling_up_while_the_backlog_clears_in_time() -> None:
    # 200 run and 1000 wait, and 10 end per second. The load is worth 24 replicas, so 1100 are
    # above the target of the 2, and gone after 110 s.
    falling = [flooded(1000.0 - 10 * second) for second in range(21)]

    assert max(decided(falling)[10:]) == 2
    assert max(decided(falling, SETTLES_LATER)[10:]) > 2
    assert max(decided(falling[::-1])[10:]) > 2


def test_a_backlog_that_clears_too_slowly_scales_up() -> None:
    falling = [flooded(1000.0 - 10 * second) for second in range(21)]
    in_time = SETTINGS.model_copy(update={"catch_up_s": 100.0})

    assert max(decided(falling, in_time)[10:]) > 2


def test_the_effect_of_new_replicas_is_awaited_for_ten_seconds() -> None:
    loads = [*[flooded(1000.0)] * 4, *[replace(flooded(1000.0, 4), target=4)] * 20]

    assert decided(loads)[4:] == [4] * 10 + [8] + [4] * 5 + [8] + [4] * 3
    assert decided(loads, SETTLES_LATER)[4:6] == [4, 8]


def test_at_most_half_are_removed_at_once_unless_the_model_is_idle() -> None:
    light = [report(threads=1, kv_use=0.0)] * 7

    assert at_once(load_of(*light)) == 4
    assert at_once(load_of(*light), max_growth=8.0) == 1
    assert at_once(load_of(*[report(requests=0, threads=0, kv_use=0)] * 7)) == 1


def test_the_target_kv_use_is_configurable() -> None:
    full = load_of(report(threads=1, kv_use=0.6))

    assert at_once(full) == 1
    assert at_once(full, target_kv_use=0.4) == 2


def test_the_first_request_for_a_model_without_replicas_starts_one_at_once() -> None:
    settings = AutoscalingConfig(min_replicas=0, max_replicas=2, upscale_delay_s=30)

    assert decided([load_of(waiting_requests=1)], settings) == [1]
    assert decided([load_of()], settings) == [0]


def test_an_idle_model_shrinks_to_its_minimum() -> None:
    idle = load_of(report(requests=0, threads=0, kv_use=0))

    assert at_once(idle) == 1
    assert at_once(idle, min_replicas=0) == 0


def test_nothing_is_removed_while_a_running_replica_has_not_reported() -> None:
    assert at_once(load_of(report(threads=1), running=3, target=3)) == 3
    assert at_once(load_of(report(threads=1), running=1, target=3)) == 1


@given(
    threads=st.lists(st.floats(0, 1000), min_size=1, max_size=8),
    waiting=st.floats(0, 1000),
    more=st.floats(0, 1000),
)
def test_more_waiting_work_never_means_fewer_replicas(
    threads: list[float], waiting: float, more: float
) -> None:
    load = load_of(*[report(threads=each) for each in threads], waiting_requests=waiting)
    heavier = replace(load, waiting_requests=waiting + more)

    fewer, many = at_once(load), at_once(heavier)

    assert 1 <= fewer <= many <= SETTINGS.max_replicas


def test_bounds_must_be_in_order_and_exclude_a_fixed_number() -> None:
    with pytest.raises(ValidationError, match="min_replicas 3 is above max_replicas 2"):
        AutoscalingConfig(min_replicas=3, max_replicas=2)
    with pytest.raises(ValidationError, match="replicas: not allowed with `autoscaling`"):
        ModelConfig(replicas=1, autoscaling=AutoscalingConfig(max_replicas=2))


def test_the_target_is_a_quarter_of_what_a_replica_can_run() -> None:
    settings = AutoscalingConfig(max_replicas=3)

    assert ModelConfig(autoscaling=settings).target_threads == 64
    assert ModelConfig(autoscaling=settings).max_replicas == 3
    given_threads = settings.model_copy(update={"target_threads": 50.0})
    assert ModelConfig(autoscaling=given_threads).target_threads == 50
