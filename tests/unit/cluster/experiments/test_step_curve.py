from __future__ import annotations

import numpy as np
import pytest

from cluster.experiments.plots import step_figure
from cluster.experiments.step_curve import CurvePoint, curve_table, fit


def points(step_s: dict[int, float]) -> list[CurvePoint]:
    return [CurvePoint(rows, 64, s, s, s) for rows, s in step_s.items()]


def test_the_knee_is_where_the_rows_cost_as_much_as_the_step_itself() -> None:
    curve = fit(points({rows: 0.010 + 0.0005 * rows for rows in (1, 4, 16, 64, 256)}))

    assert curve.fixed_s == pytest.approx(0.010)
    assert curve.row_s == pytest.approx(0.0005)
    assert curve.knee_rows == pytest.approx(20)


def test_a_slow_point_among_many_rows_does_not_move_the_fixed_part_much() -> None:
    step_s = {rows: 0.010 + 0.0005 * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128)}
    step_s[128] *= 1.1

    # By absolute errors the fixed part would be half as long.
    assert fit(points(step_s)).fixed_s == pytest.approx(0.010, rel=0.02)


@pytest.mark.parametrize("step_s", [{1: 0.011, 8: 0.010}, {1: 0.01, 8: 0.09}])
def test_there_is_no_knee_where_a_row_or_a_step_costs_nothing(step_s: dict[int, float]) -> None:
    curve = fit(points(step_s))

    assert curve.knee_rows is None
    # Two points, the line, and no third line for the knee.
    assert len(step_figure(curve).axes[0].get_lines()) == 2


def test_points_stand_beside_what_the_line_says() -> None:
    curve = fit(points({1: 0.011, 8: 0.018}))

    table = curve_table(curve)

    assert table.rows[1] == pytest.approx((8, 18.0, 18.0, 18.0, 18.0, 8 / 0.018))
    assert [column.title for column in table.columns][-2:] == ["line ms", "tokens/s"]


def test_the_figure_shows_points_line_and_knee() -> None:
    time, throughput = step_figure(fit(points({1: 0.012, 8: 0.026}))).axes

    drawn = {line.get_label(): line for line in time.get_lines()}
    assert np.asarray(drawn["median"].get_ydata()) == pytest.approx([12.0, 26.0])
    assert np.asarray(drawn["10.00 ms + 2.000 ms a row"].get_ydata()) == pytest.approx([12.0, 26.0])
    assert drawn["knee: 5 rows"].get_data()[0] == pytest.approx([5, 5])
    rates, knee = throughput.get_lines()
    assert np.asarray(rates.get_ydata()) == pytest.approx([1 / 0.012, 8 / 0.026])
    assert knee.get_data()[0] == pytest.approx([5, 5])
    assert (time.get_ylabel(), throughput.get_ylabel()) == ("ms", "tokens / s")
