"""A replica's load report from its engine's counters."""

from dataclasses import asdict

import pytest

from apar_core.scheduler.core_state import CoreState
from deployments.replica.replica import LoadReporter
from deployments.wire.load import ReplicaLoad
from tests.fakes.core_states import a_core_state


def state(num_steps: int, num_rows: int, busy_s: float) -> CoreState:
    return a_core_state(
        requests=9,
        threads=11,
        deferred_threads=2,
        kv_blocks=500,
        free_blocks=420,
        steps={"num_steps": num_steps, "num_rows": num_rows, "busy_s": busy_s},
    )


def test_counts_are_current_and_rates_cover_the_last_seconds() -> None:
    reporter = LoadReporter(block_size=32)
    reporter.report(state(0, 0, 0.0), 3, 100.0)
    load = reporter.report(state(50, 500, 0.5), 3, 101.0)

    assert (load.requests, load.threads, load.waiting_forks) == (3, 11, 2)
    assert (load.blocks, load.free_blocks, load.block_size) == (500, 420, 32)
    assert load.tokens_per_s == pytest.approx(1000.0)
    assert load.step_s == pytest.approx(0.01)
    assert load.taken_at_s == 101.0


def test_rates_follow_the_load() -> None:
    reporter = LoadReporter(block_size=32)
    for index in range(100):
        reporter.report(state(100 * index, 100 * index, float(index) / 10), 3, index / 10)
    for index in range(1, 41):
        load = reporter.report(
            state(9900 + 10 * index, 9900 + 80 * index, 9.9 + index / 10), 3, 9.9 + index / 10
        )

    assert load.step_s == pytest.approx(0.01)
    assert load.tokens_per_s == pytest.approx(800.0)


def test_an_engine_that_has_not_run_has_no_rates() -> None:
    reporter = LoadReporter(block_size=32)
    reporter.report(state(10, 10, 1.0), 3, 0.0)
    load = reporter.report(state(10, 10, 1.0), 3, 5.0)

    assert (load.tokens_per_s, load.step_s) == (0.0, 0.0)


def test_an_engine_without_forks_can_report() -> None:
    load = LoadReporter(block_size=16).report(a_core_state(threads=1), 1, 1.0)

    assert (load.waiting_forks, load.step_s) == (0, 0.0)


def test_a_report_survives_its_plain_form() -> None:
    load = LoadReporter(block_size=16).report(state(1, 2, 0.1), 3, 1.0)

    assert ReplicaLoad.from_stats(asdict(load)) == load
    assert ReplicaLoad.from_stats({}) is None
    assert ReplicaLoad.from_stats(asdict(load) | {"from_the_future": 1}) is None
