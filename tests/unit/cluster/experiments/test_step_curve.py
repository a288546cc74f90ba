from pathlib import Path

import pytest

from cluster.experiments.step_curve import CurvePoint, fit, write_curve


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


def test_points_line_and_plot_are_written(tmp_path: Path) -> None:
    curve = fit(points({1: 0.011, 8: 0.014, 64: 0.042}))

    paths = write_curve(curve, tmp_path / "out")

    assert [path.name for path in paths] == ["step-curve.json", "step-curve.png", "step-curve.svg"]
    assert all(path.stat().st_size > 0 for path in paths)
