"""Run `apar evaluate speed` on real answers and on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not here")


def speed(out: Path, *arguments: str | Path) -> dict[str, Any]:
    """Return the report."""
    command = ["evaluate", "speed", "--out", str(out), *map(str, arguments)]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 0, answer.output
    assert "Report:" in answer.output
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def averages(report: dict[str, Any], part: str = "answers") -> dict[str, float]:
    values: dict[str, float] = report["runs"][0][part]["averages"]["all"]
    return values


@pytest.mark.ci
@needs_data
def test_real_answers_are_counted_as_the_sources_figures_say(tmp_path: Path) -> None:
    trace = DATA / "traces" / "structured.jsonl"
    found = averages(speed(tmp_path, "--replay", trace, "--count-only"))

    # SOURCES.md: over the whole trace, of which this is a half.
    assert found["threads"] == pytest.approx(6.5, abs=0.4)
    assert found["sequential_steps"] / found["steps"] == pytest.approx(2.12, abs=0.15)
    saved = 1 - found["max_cached_tokens"] / found["sequential_max_cached_tokens"]
    assert saved == pytest.approx(0.22, abs=0.03)


@needs_data
def test_the_papers_numbers_stand_beside_those_of_its_benchmarks(tmp_path: Path) -> None:
    answers = DATA / "mt_bench_answers" / "vicuna-7b-v1.3.jsonl"
    report = speed(
        tmp_path, "--replay", answers, "--count-only", "--benchmark-files", DATA / "fastchat"
    )

    [row] = report["tables"]["table1_max_cached_tokens"]["rows"]
    assert row[:2] == ["MT Bench", "vicuna-7b-v1.3"]
    assert row[6:8] == [502.1, 571.1]
    # The paper's trained model forks on about as much as the rules do on its parent's answers.
    assert averages(report)["forking_share"] == pytest.approx(0.39, abs=0.06)
    assert averages(report)["threads"] == pytest.approx(2.7, abs=0.3)


@pytest.mark.ci
def test_the_embedded_model_forks_where_plain_decoding_goes_on_alone(tmp_path: Path) -> None:
    arguments = ("--prompts", "held-out", "--answers", "4", "--device", "cpu")
    report = speed(tmp_path, *arguments)
    first = (tmp_path / "answers.jsonl").read_text()

    assert averages(report)["threads"] > averages(report, "baseline")["threads"] == 1
    assert averages(report)["steps"] < averages(report)["sequential_steps"]
    assert (tmp_path / "figure4_speed.svg").is_file()
    # Nothing is left to generate for the same command.
    assert averages(speed(tmp_path, *arguments)) == averages(report)
    assert (tmp_path / "answers.jsonl").read_text() == first
