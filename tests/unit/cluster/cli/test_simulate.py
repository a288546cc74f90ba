from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli.main import app

LIST = "\n".join(f"{number}. Item {number}: " + "some words of detail " * 6 for number in (1, 2, 3))


def simulate(tmp_path: Path, *options: str) -> Result:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"id": number, "prompt": "Give me tips.", "response": LIST if number % 2 else "Just this."}
        for number in range(8)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = str(tmp_path / "out")
    return CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["simulate", "--trace", str(trace), "--out", out, *options]
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--catch-up", "60"), "--target-threads and --catch-up need --autoscale"),
        (("--autoscale", "many"), "'many' is not MIN-MAX, such as 2-16"),
        (("--slow", "3", "--replicas", "2"), "3 of 2 replicas cannot be slow"),
        (("--router", "nearest"), "'nearest' is not one of threads"),
        (("--attention", "flash"), "'flash' is not one of ordinary, family"),
        (("--fork-policy", "never"), "'never' is not one of eager, adaptive, off"),
        (("--kill", "soon"), "soon"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, options: tuple[str, ...], problem: str
) -> None:
    done = simulate(tmp_path, *options)

    assert done.exit_code == 2
    assert problem in done.output
    assert not (tmp_path / "out").exists()


def test_an_unknown_gpu_is_named(tmp_path: Path) -> None:
    done = simulate(tmp_path, "--gpu", "abacus")

    assert done.exit_code == 2
    assert "Invalid value for '--gpu': unknown GPU 'abacus': known are" in done.output


@pytest.mark.slow
def test_a_cluster_is_simulated_and_reported_and_two_runs_write_the_same_bytes(
    tmp_path: Path,
) -> None:
    options = (
        "--replicas", "2", "--rate", "4", "--duration", "4s", "--fork-policy", "eager,off",
        "--seeds", "2", "--kill", "1s", "--start-delay", "1s",
    )  # fmt: skip
    folder = tmp_path / "out"

    first = simulate(tmp_path, *options)
    files = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    second = simulate(tmp_path, *options)

    assert (first.exit_code, second.exit_code) == (0, 0)
    assert "predicted for llama-7b on a100-80gb" in first.output
    assert {"report.html", "report.json", "latency.csv", "timeline.png"} <= files.keys()
    assert files == {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
