"""Step costs are exact at the points of their table, continuous, and grow with the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar_core.step_costs.costs import StepBatch, StepCosts

COSTS = StepCosts(
    "n", "predicted", "s", ((1, 0.010), (64, 0.012), (128, 0.020)), 1e-6,
    launch_s=0.001, copied_block_s=1e-5, row_s=2e-6, host_base_s=5e-5, host_row_s=1e-5,
    largest_graph=96, eager_launch_s=0.003,
)  # fmt: skip

BATCHES = st.builds(
    StepBatch, st.integers(1, 400), st.integers(0, 10**6), st.integers(0, 4096), st.integers(0, 9)
)


def test_the_parts_of_a_step_are_added() -> None:
    batch = StepBatch(rows=10, attended_tokens=1000, prefill_tokens=54, copied_blocks=2)

    assert batch.tokens == 64
    assert COSTS.device_s(batch) == pytest.approx(0.001 + 0.012 + 20e-6 + 1e-3 + 2e-5)
    assert COSTS.host_s(10) == pytest.approx(1.5e-4)
    assert COSTS.step_s(batch) == pytest.approx(COSTS.device_s(batch) + 1.5e-4)
    assert COSTS.step_s(batch, overlapped=True) == COSTS.device_s(batch)


def test_a_step_of_more_tokens_than_the_largest_graph_launches_its_kernels() -> None:
    below, above = (COSTS.device_s(StepBatch(1, 0, tokens - 1)) for tokens in (96, 97))

    assert above - below == pytest.approx(0.002 + 0.008 / 64)


def test_groups_save_the_reading_of_tokens_and_cost_passes_groups_and_rows() -> None:
    costs = replace(COSTS, group_pass_s=5e-4, group_s=7e-6, grouped_row_s=3e-7)
    today = StepBatch(rows=10, attended_tokens=1000)
    family = replace(today, saved_tokens=600, group_passes=2, groups=3, grouped_rows=8)

    assert family.read_tokens == 400
    change_s = -600e-6 + 2 * 5e-4 + 3 * 7e-6 + 8 * 3e-7
    assert costs.device_s(family) == pytest.approx(costs.device_s(today) + change_s)
    assert costs.slower(2.0).device_s(family) == pytest.approx(2 * costs.device_s(family))
    grown = family.grown(rows=1, attended_tokens=100, saved_tokens=90)
    assert grown == replace(family, rows=11, attended_tokens=1100, saved_tokens=690)


def test_a_slow_host_takes_longer_than_the_device() -> None:
    slow = replace(COSTS, host_row_s=1.0)

    assert slow.step_s(StepBatch(3, 0), overlapped=True) == pytest.approx(3.00005)


def test_the_table_is_exact_at_its_points_and_proportional_beyond() -> None:
    assert [COSTS.matrix_time_s(tokens) for tokens in (1, 64, 128)] == [0.010, 0.012, 0.020]
    assert COSTS.matrix_time_s(96) == pytest.approx(0.016)
    assert COSTS.matrix_time_s(1280) == pytest.approx(0.2)


@pytest.mark.parametrize("table", [(), ((0, 1.0),), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0))])
def test_a_table_that_does_not_increase_is_refused(table: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="must increase"):
        replace(COSTS, matrix_s=table)


@given(st.integers(1, 5000))
def test_one_more_token_changes_the_matrix_time_little(tokens: int) -> None:
    rise = COSTS.matrix_time_s(tokens + 1) - COSTS.matrix_time_s(tokens)

    assert 0 <= rise <= 0.020 / 128 * (1 + 1e-9)


@given(BATCHES, st.integers(0, 50), st.integers(0, 5000))
def test_more_work_never_takes_less_time(batch: StepBatch, rows: int, attended: int) -> None:
    grown = batch.grown(rows=rows, attended_tokens=attended)

    assert grown.tokens == batch.tokens + rows
    assert COSTS.device_s(grown) >= COSTS.device_s(batch)
    assert COSTS.step_s(grown, overlapped=True) >= COSTS.step_s(batch, overlapped=True)


@given(BATCHES, st.floats(0.1, 10))
def test_a_slower_device_takes_the_factor_longer_with_the_same_host(
    batch: StepBatch, factor: float
) -> None:
    slow = COSTS.slower(factor)

    assert slow.device_s(batch) == pytest.approx(factor * COSTS.device_s(batch))
    assert slow.host_s(batch.rows) == COSTS.host_s(batch.rows)
