"""`python -m benchmarks simulation` from end to end, in its quick mode."""

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cluster_simulation.choosers import CHOOSERS

DATA = Path(__file__).resolve().parents[5] / "shared" / "data"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["simulation", "--quick", "--data", str(tmp_path)])

    assert result.exit_code == 1
    assert "mixed.jsonl" in result.output.replace("\n", "")


@pytest.mark.parametrize("option", ["--only", "--policy", "--model"])
def test_an_unknown_name_is_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["simulation", option, "guessing"])

    assert result.exit_code == 2
    assert "guessing" in result.output


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no recorded answers and arrivals in {DATA}")
def test_quick_mode_compares_everything_and_writes_it_down(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["simulation", "--quick", "--data", str(DATA), "--out", str(tmp_path)]
    )

    assert result.exit_code == 0, result.output
    for model in ("7b-roofline", "tiny-measured"):
        with (tmp_path / f"routing-{model}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert tuple(row["policy"] for row in rows) == CHOOSERS
        assert all(float(row["p50_s"]) < float(row["p99_s"]) for row in rows)
        assert (tmp_path / f"forking-{model}.md").read_text().count("\n") == 5
        assert "threads" in (tmp_path / f"routing-{model}.md").read_text()
        assert (tmp_path / f"scaling-{model}.png").stat().st_size > 10_000


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no recorded answers and arrivals in {DATA}")
def test_some_policies_alone_in_two_processes_give_what_they_give_in_one(tmp_path: Path) -> None:
    options = ["simulation", "--quick", "--only", "routing", "--model", "tiny-measured"]
    options += ["--policy", "random", "--policy", "threads", "--data", str(DATA)]

    def routing_csv(jobs: int) -> str:
        out = tmp_path / str(jobs)
        result = CliRunner().invoke(app, [*options, "--jobs", str(jobs), "--out", str(out)])
        assert result.exit_code == 0, result.output
        return (out / "routing-tiny-measured.csv").read_text()

    assert routing_csv(2) == routing_csv(1)
    assert routing_csv(1).count("\n") == 3
