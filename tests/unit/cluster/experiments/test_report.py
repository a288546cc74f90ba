import csv
from pathlib import Path

import pytest

from apar_core.errors import EvaluationError
from cluster.experiments.cells import CategoryCounts, CellStore
from cluster.experiments.report import write_experiment
from cluster.experiments.run import run_experiments
from cluster.experiments.settings import ExperimentSettings
from tests.unit.cluster.experiments.played_cells import cell

SETTINGS = ExperimentSettings(trace=Path("answers.jsonl"), modes=("sequential", "eager"))


def counts(answers: int, cached: int, flat: int) -> CategoryCounts:
    return CategoryCounts(
        answers=answers,
        forked=answers,
        threads=3 * answers,
        predicted_tokens=10 * answers,
        sequential_predicted_tokens=10 * answers,
        max_cached_tokens=cached * answers,
        sequential_max_cached_tokens=flat * answers,
        attended_tokens=cached * answers,
        sequential_attended_tokens=flat * answers,
    )


def store(tmp_path: Path) -> CellStore:
    cells = CellStore(tmp_path, SETTINGS)
    for share, sequential, eager in (
        (0.1, 40.0, 100.0),
        (0.2, 50.0, 120.0),
        (0.9, 100.0, 151.0),
    ):
        cells.add(cell("sequential", kv_share=share, tokens_per_s=sequential))
        categories = {
            "writing": counts(6, 60, 100),
            "math": counts(3, 90, 90),
            "one": counts(1, 80, 100),
        }
        cells.add(cell("eager", kv_share=share, tokens_per_s=eager, categories=categories))
    for mode, latency_s in (("sequential", 2.0), ("eager", 1.0)):
        cells.add(
            cell(
                "eager" if mode == "eager" else "sequential",
                figure="fig5b",
                kv_share=0.9,
                concurrency=4,
                latency_s=latency_s,
            )
        )
    return cells


def test_figure_5a_says_which_goals_are_met(tmp_path: Path) -> None:
    page = write_experiment("fig5a", store(tmp_path), SETTINGS, tmp_path).read_text()

    assert "of the KV cache: 0.1: 2.50x, 0.2: 2.40x, 0.9: 1.51x (met)" in page
    assert "surpassed with 0.2: 1.20x (met)" in page
    assert "on the mixed trace at least 1.0x sequential:  (not measured)" in page
    with (tmp_path / "fig5a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["kv_share"], row["mode"], row["tokens_per_s"]) for row in rows] == [
        ("0.1", "sequential", "40.0"),
        ("0.1", "eager", "100.0"),
        ("0.2", "sequential", "50.0"),
        ("0.2", "eager", "120.0"),
        ("0.9", "sequential", "100.0"),
        ("0.9", "eager", "151.0"),
    ]
    assert {row["kept_samples"] for row in rows} == {"3"}
    assert (tmp_path / "fig5a.png").stat().st_size > 0


@pytest.mark.parametrize("names", [("table1",), ("fig5a", "fig5b", "table1", "table2")])
def test_a_table_without_the_runs_it_is_counted_in_is_refused_before_any_run(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    settings = SETTINGS.model_copy(update={"modes": ("sequential", "adaptive")})

    with pytest.raises(EvaluationError, match="--methods sequential,adaptive has no eager: table1"):
        run_experiments(names, settings, tmp_path / "out", lambda title, number: lambda: None)
    assert not (tmp_path / "out").exists()


def test_figure_5b_has_a_plot_and_its_goal(tmp_path: Path) -> None:
    page = write_experiment("fig5b", store(tmp_path), SETTINGS, tmp_path).read_text()

    assert "at equal concurrency: 4: 0.50x (met)" in page
    assert (tmp_path / "fig5b.png").stat().st_size > 0


def test_tables_leave_out_of_the_mean_what_the_paper_leaves_out(tmp_path: Path) -> None:
    page = write_experiment("table1", store(tmp_path), SETTINGS, tmp_path).read_text()

    # (6 * 60 + 80) / 7 beside 100.
    assert "| Mean | 7 | 3.0 | 62.9 | 100.0 | 37.1 |" in page
    assert "| math | 3 | 3.0 | 90.0 | 90.0 | 0.0 |" in page
    assert "| others | 1 | 3.0 | 80.0 | 100.0 | 20.0 |" in page

    page = write_experiment("table2", store(tmp_path / "x"), SETTINGS, tmp_path).read_text()
    assert "| Mean | 7 | 3.0 | 6.3 | 10.0 | 37.1 |" in page
