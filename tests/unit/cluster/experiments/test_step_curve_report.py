"""The report of the step curve, from points of an engine that is played."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from apar_core.reporting import Report, write_report
from cluster.experiments.step_curve import CurveLoad, CurvePoint
from cluster.experiments.step_curve_report import curve_settings, report_step_curve

LOAD = CurveLoad((1, 8, 64))


class Played:
    """Points by a rule, those that were measured, and those at which it breaks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured: list[int] = []
        self.breaks_at: int | None = None
        self.opened = 0
        monkeypatch.setattr("cluster.experiments.open_engine.open_engine", self.open)
        monkeypatch.setattr("cluster.experiments.step_curve.measure_point", self.measure)

    @contextmanager
    def open(self, settings: Any, path: str) -> Iterator[Any]:
        self.opened += 1
        yield SimpleNamespace(scheduler=SimpleNamespace(max_num_running_reqs=64))

    def measure(self, engine: Any, rows: int, load: CurveLoad) -> CurvePoint:
        if rows == self.breaks_at:
            raise EvaluationError("interrupted")
        self.measured.append(rows)
        step_s = 0.010 + 0.0005 * rows
        return CurvePoint(rows, load.context_tokens, step_s, 0.9 * step_s, 1.1 * step_s)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def report(folder: Path, load: CurveLoad = LOAD, model: str = "apar-tiny") -> Report:
    settings = curve_settings(model=model, load=load, engine=None)
    return report_step_curve(settings, load, folder, lambda *_: lambda: None)


def test_an_interrupted_curve_goes_on_behind_its_last_point(tmp_path: Path, played: Played) -> None:
    played.breaks_at = 64
    with pytest.raises(EvaluationError, match="interrupted"):
        report(tmp_path)
    played.breaks_at = None

    found = report(tmp_path)

    assert played.measured == [1, 8, 64]
    assert [row[0] for row in found.tables[0].rows] == [1, 8, 64]
    # No engine is started where all is there.
    assert report(tmp_path).tables == found.tables
    assert (played.measured, played.opened) == ([1, 8, 64], 2)


@pytest.mark.parametrize(
    ("load", "model", "message"),
    [
        (CurveLoad((1, 8)), "apar-tiny", "load_row_counts was"),
        (CurveLoad((1, 8, 64), steps=5), "apar-tiny", "load_steps was '20', is '5'"),
        (CurveLoad((1, 8, 64), 32), "apar-tiny", "load_context_tokens was '64', is '32'"),
        (LOAD, "apar-7b", "model was 'apar-tiny', is 'apar-7b'"),
    ],
)
def test_a_folder_with_other_settings_is_refused(
    tmp_path: Path, played: Played, load: CurveLoad, model: str, message: str
) -> None:
    report(tmp_path)

    with pytest.raises(EvaluationError, match=message):
        report(tmp_path, load, model)


def test_the_page_tells_the_knee(tmp_path: Path, played: Played) -> None:
    write_report(report(tmp_path), tmp_path)

    page = (tmp_path / "report.md").read_text()
    assert "- A step costs: 10.00 ms, and 0.500 ms a row" in page
    assert "- Knee: 20 rows take as long as what every step costs" in page
    assert "![step-curve](step-curve.png)" in page
    assert "| 64 | 42.00 | 37.80 | 46.20 | 42.00 | 1524 |" in page
    assert (tmp_path / "step-curve.svg").stat().st_size > 0


def test_more_rows_than_the_engine_runs_are_refused_instead_of_waited_for(
    tmp_path: Path, played: Played
) -> None:
    with pytest.raises(EvaluationError, match="65 rows are more than the 64 that the engine runs"):
        report(tmp_path, CurveLoad((1, 65)))

    assert not played.measured
    # And the folder is free for the next try.
    report(tmp_path, CurveLoad((1, 64)))


def test_the_engine_has_room_for_the_most_rows_and_their_steps() -> None:
    settings = curve_settings(model="apar-tiny", load=CurveLoad((1, 100), 64, 20), engine={"a": 1})

    assert settings.max_tokens == 64 + 40 + 100
    assert settings.kv_tokens == 100 * (64 + 60 + 32) + settings.max_tokens
    assert settings.engine == {"a": 1}
