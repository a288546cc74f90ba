"""The linear model of step times, and the slowness of each replica."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.config.routing import RoutingSettings
from deployments.routing.policies import build_router
from deployments.routing.table import StepTime
from tests.unit.deployments.routing.loads import FORKED, HINT, IDLE, busy


def learnt(slowness: list[float], *, base_s: float, per_thread_s: float) -> StepTime:
    step_time = StepTime(len(slowness))
    number = random.Random(1)
    for _ in range(400):
        for slot, factor in enumerate(slowness):
            threads = number.uniform(1, 100)
            noise = number.uniform(0.95, 1.05)
            step_time.measured(slot, threads, noise * factor * (base_s + per_thread_s * threads))
    return step_time


def predicted(step_time: StepTime, slot: int, threads: float) -> float:
    line = step_time.base_s + step_time.per_thread_s * threads
    return float(line * step_time.slowness[slot])


@pytest.mark.parametrize(("base_s", "per_thread_s"), [(0.02, 0.0001), (0.002, 0.00013)])
def test_predicted_step_times_match_the_measured_ones(base_s: float, per_thread_s: float) -> None:
    step_time = learnt([1.0, 1.0, 2.5], base_s=base_s, per_thread_s=per_thread_s)

    for slot, factor in enumerate([1.0, 1.0, 2.5]):
        for threads in (5, 50, 95):
            expected = factor * (base_s + per_thread_s * threads)
            assert predicted(step_time, slot, threads) == pytest.approx(expected, rel=0.15)


def test_a_replica_with_one_load_takes_the_slope_from_the_others() -> None:
    step_time = learnt([1.0, 1.0], base_s=0.01, per_thread_s=0.0002)
    step_time.resize(3)
    for _ in range(50):
        step_time.measured(2, 10, 2 * 0.012)

    assert predicted(step_time, 2, 100) == pytest.approx(2 * 0.03, rel=0.15)


def test_a_new_replica_in_a_slot_starts_at_normal_speed() -> None:
    step_time = learnt([1.0, 3.0], base_s=0.01, per_thread_s=0.0002)
    step_time.forget(1)

    assert step_time.slowness[1] == 1.0


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0.01, 1e4), st.floats(1e-6, 100.0)), max_size=60
    )
)
def test_step_times_stay_positive_for_any_report(reports: list[tuple[int, float, float]]) -> None:
    step_time = StepTime(3)
    for slot, threads, step_s in reports:
        step_time.measured(slot, threads, step_s)

    assert step_time.base_s > 0
    assert step_time.per_thread_s >= 0
    assert (step_time.slowness > 0).all()


def test_a_replica_that_was_slow_for_a_moment_gets_requests_again() -> None:
    router = build_router(RoutingSettings(), seed=1)
    router.replicas_changed({"slow": 8, "fast": 8})
    for tick in range(40):
        router.reported("slow", busy(1, 2, step_s=0.5, at_s=tick), tick)
        router.reported("fast", busy(1, 2, step_s=0.01, at_s=tick), tick)

    def choices(seconds: range) -> Counter[str | None]:
        """Replicas chosen for one request per second, while the slow replica idles."""
        chosen: Counter[str | None] = Counter()
        for now_s in seconds:
            router.reported("slow", replace(IDLE, taken_at_s=now_s), now_s)
            router.reported("fast", busy(1, 2, step_s=0.01, at_s=now_s), now_s)
            name = router.choose(HINT)
            assert name is not None
            router.sent(str(now_s), name, HINT, now_s)
            router.ended(str(now_s), FORKED, now_s)
            chosen[name] += 1
        return chosen

    assert choices(range(40, 45)) == {"fast": 5}
    choices(range(45, 160))
    assert choices(range(160, 170)) == {"slow": 10}
