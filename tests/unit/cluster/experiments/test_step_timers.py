from __future__ import annotations

import pytest

from cluster.experiments.step_timers import PartTimers


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_second_counts_for_the_innermost_part_only() -> None:
    clock = Clock()
    timers = PartTimers(clock)
    inner = timers.timed("inner", lambda: clock.passes(3))

    def outer() -> str:
        clock.passes(1)
        inner()
        clock.passes(2)
        inner()
        return "done"

    assert timers.timed("outer", outer)() == "done"
    assert timers.seconds == {"inner": 6, "outer": 3}
    assert timers.calls == {"inner": 2, "outer": 1}


def test_a_part_within_a_part_of_the_same_name_counts_once() -> None:
    clock = Clock()
    timers = PartTimers(clock)
    inner = timers.timed("inputs", lambda: clock.passes(2))

    def outer() -> None:
        inner()
        clock.passes(1)

    timers.timed("inputs", outer)()

    assert timers.seconds == {"inputs": 3}


def test_the_time_of_a_call_that_fails_is_kept() -> None:
    clock = Clock()
    timers = PartTimers(clock)

    def fail() -> None:
        clock.passes(1)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        timers.timed("outer", timers.timed("inner", fail))()

    assert timers.seconds == {"inner": 1, "outer": 0}
