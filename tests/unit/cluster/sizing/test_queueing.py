"""The queue's formulas against textbook cases and against a simulation of the same queue."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.sizing.queueing import ReplicaModel, operate

MODEL = ReplicaModel(
    base_s=0.01, growth_s=0.0002, steps=200, long_steps=600, prefill_s=0.01, cap=100
)


def test_without_a_base_it_is_processor_sharing_of_one_server() -> None:
    # One request alone takes steps * growth = 1 s, and n of them n times as long: M/M/1-PS.
    replica = ReplicaModel(0.0, 0.01, 100, 100, 0.0, cap=2000)

    operation = operate(replica, 0.8)

    assert replica.full_rate == pytest.approx(1.0)
    assert operation.requests == pytest.approx(0.8 / 0.2, rel=1e-3)
    assert operation.mean_latency_s == pytest.approx(1 / (1 - 0.8), rel=1e-3)
    assert operation.busy_requests == math.ceil(math.log(0.01) / math.log(0.8)) - 1


def test_without_growth_it_is_a_delay_and_the_number_inside_is_poisson() -> None:
    replica = ReplicaModel(0.01, 0.0, 100, 100, 0.0, cap=500)

    operation = operate(replica, 20.0)

    assert operation.requests == pytest.approx(20.0)
    assert operation.mean_latency_s == pytest.approx(1.0)
    assert operation.busy_requests == 31  # the 99 % quantile of Poisson(20)


def test_one_place_is_a_queue_of_one_server() -> None:
    replica = ReplicaModel(0.01, 0.0, 100, 100, 0.0, cap=1)

    operation = operate(replica, 0.5)

    # M/M/1: a mean of 2 s inside; 1 in 100 waits longer than ln(0.5 / 0.01) / (1 - 0.5).
    assert operation.mean_latency_s == pytest.approx(2.0)
    assert operation.wait_s == pytest.approx(math.log(50) / 0.5)
    assert operation.requests == pytest.approx(0.5)


def test_littles_law_holds_where_nobody_waits() -> None:
    operation = operate(MODEL, 0.5 * MODEL.full_rate)

    assert operation.wait_s == 0
    assert operation.requests == pytest.approx(operation.rate * operation.mean_latency_s, rel=1e-6)
    # Where the base is shared by all, the mean number solves n = rate * steps * step(n).
    work = MODEL.steps * MODEL.growth_s * operation.rate
    assert operation.requests == pytest.approx(
        operation.rate * MODEL.steps * MODEL.base_s / (1 - work), rel=0.05
    )


def test_a_simulated_queue_agrees() -> None:
    """Arrivals by chance, answers of very different lengths, each event one by one."""
    replica = ReplicaModel(0.01, 0.001, 100, 100, 0.0, cap=20)
    rate = 0.85 * replica.full_rate
    draw = random.Random(3)
    inside: list[float] = []
    queue = 0
    now = total = 0.0
    arrival = draw.expovariate(rate)
    while now < 40_000:
        speed = 1 / replica.step_s(len(inside)) if inside else 0.0
        end = now + min(inside) / speed if inside else math.inf
        until = min(arrival, end)
        total += (len(inside) + queue) * (until - now)
        inside = [left - (until - now) * speed for left in inside]
        now = until
        if now == arrival:
            arrival = now + draw.expovariate(rate)
            queue += 1
        else:
            inside.remove(min(inside))
        while queue and len(inside) < replica.cap:
            queue -= 1
            # Half of the answers are short, half are long; the mean is `steps`.
            inside.append(draw.choice((20.0, 180.0)))

    operation = operate(replica, rate)

    assert total / now == pytest.approx(operation.mean_latency_s * rate, rel=0.06)


@settings(deadline=None)
@given(st.floats(0.05, 0.9), st.floats(0.01, 0.09))
def test_more_load_is_better_for_nothing(share: float, more: float) -> None:
    low = operate(MODEL, share * MODEL.full_rate)
    high = operate(MODEL, (share + more) * MODEL.full_rate)

    for name in (
        "requests", "busy_requests", "step_s", "busy_step_s", "wait_s", "first_token_s",
        "latency_s", "mean_latency_s",
    ):  # fmt: skip
        assert getattr(low, name) <= getattr(high, name) + 1e-9, name


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5])
def test_a_rate_that_cannot_be_kept_up_with_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="is not within"):
        operate(MODEL, share * MODEL.full_rate)
