"""Run `apar experiment` as a user does, resume it, and refuse a folder of other settings."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.files import write_costs
from cluster.lab.experiments.methods import PEER_METHODS

# Fifteen minutes each on a busy machine.
pytestmark = pytest.mark.timeout(3600)

STRUCTURED = Path("../shared/data/traces/structured.jsonl").resolve()
APAR = Path(sys.executable).with_name("apar")
TIPS = "\n".join(f"{i}. Tip {i}: do this and that, and then do it again." for i in range(1, 6))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    lines = [
        {"id": i, "category": "writing", "prompt": f"Give me {i} tips.", "response": TIPS}
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: str | Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [APAR, "experiment", *arguments, "--out", out],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


POINTS = ("--kv-shares", "0.2,0.9", "--concurrency", "1,4", "--max-requests", "8")
SMALL = ("--answers", "14", "--kv-tokens", "4096", "--context-length", "512")


@pytest.mark.slow
def test_virtual_runs_are_the_same_bytes_in_one_process_and_in_several(
    tmp_path: Path, trace: Path
) -> None:
    options = ("--trace", trace, "--mixed-trace", trace, *POINTS, *SMALL, "--gpu", "a100-80gb,h100")
    one, two = tmp_path / "one", tmp_path / "two"

    # An interrupted run: figure 5a is there when the others are asked for.
    assert run("fig5a", *options, "--workers", "1", out=one).returncode == 0
    first = run("all", *options, "--workers", "1", out=one)
    second = run("all", *options, "--workers", "2", out=two)

    assert first.returncode == second.returncode == 0, second.stderr
    assert (one / "runs.jsonl").read_bytes() == (two / "runs.jsonl").read_bytes()
    names = {path.relative_to(two) for path in (two / "all").rglob("*") if path.is_file()}
    assert {Path("all/report.md"), Path("all/tables/ratios.csv")} < names
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    with (two / "all" / "tables" / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    # On each GPU: all methods at two shares of two traces, and 3 in loops of 1 and 4 requests.
    assert len(rows) == 2 * (len(PEER_METHODS) * 2 * 2 + 3 * 2)
    other = run("fig5a", *options, "--seed", "7", out=two)
    assert other.returncode == 1
    assert "seed was '0', is '7'" in other.stderr


@pytest.mark.slow
def test_a_real_engine_is_measured_with_the_same_command(tmp_path: Path, trace: Path) -> None:
    options = ("--trace", trace, "--engine", "real", "--model", "apar-tiny", *POINTS, *SMALL)

    done = run("fig5a", *options, "--sample-every", "500ms", "--block-size", "32", out=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "measured on" in (tmp_path / "fig5a" / "report.md").read_text().splitlines()[0]
    with (tmp_path / "fig5a" / "tables" / "runs.csv").open() as file:
        steps = {
            (row["KV share"], row["method"]): float(row["steps"]) for row in csv.DictReader(file)
        }
    assert len(steps) == 2 * 3
    assert steps["0.9", "eager"] < steps["0.9", "sequential"]


TABLE = {
    0.1: (1.83, 1.79, 0.55, 28, 64),
    0.3: (1.44, 1.40, 0.71, 80, 164),
    0.5: (1.41, 1.33, 0.76, 125, 225),
    0.9: (1.39, 1.28, 0.80, 181, 297),
}
"""By share of the KV cache: eager over sequential in sampled throughput, that of the whole run and
mean latency, and rows per step of both. From the prototype of virtual engines (2026-11-22)."""
MATRIX_MS = ((1, 9.3), (64, 9.75), (128, 11.1), (192, 16.6), (256, 16.6), (384, 22.1), (512, 28.8))


@pytest.mark.slow
@pytest.mark.skipif(not STRUCTURED.is_file(), reason=f"needs {STRUCTURED}")
def test_the_prototypes_table_is_reproduced_with_its_settings(tmp_path: Path) -> None:
    costs = StepCosts(
        "7B on A100",
        "predicted",
        "the prototype's",
        tuple((tokens, ms / 1000) for tokens, ms in MATRIX_MS),
        524_288 / (0.8 * 2.039e12),
        launch_s=1e-3,
    )
    write_costs(costs, tmp_path / "costs.json")
    options: list[str | Path] = ["--trace", STRUCTURED, "--costs", tmp_path / "costs.json"]
    options += ["--answers", "948", "--kv-tokens", "108304", "--no-async-scheduling"]
    options += ["--growth-reserve", "0"]
    options += ["--methods", "sequential,eager", "--kv-shares", ",".join(map(str, TABLE))]

    done = run("fig5a", *options, out=tmp_path / "out")

    assert done.returncode == 0, done.stderr
    with (tmp_path / "out" / "fig5a" / "tables" / "runs.csv").open() as file:
        rows = {(float(row["KV share"]), row["method"]): row for row in csv.DictReader(file)}
    for share, (sampled, whole, latency, *row_counts) in TABLE.items():
        eager = rows[share, "eager"]
        names = ("throughput x", "whole run x", "latency x")
        assert [round(float(eager[name]), 2) for name in names] == [sampled, whole, latency]
        assert row_counts == [
            round(float(rows[share, method]["rows a step"])) for method in ("sequential", "eager")
        ]


@pytest.mark.slow
@pytest.mark.cluster
def test_a_served_replica_answers_the_load_of_scale_out(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "new" / "out"
    options = ("--replicas", "1", "--answers", "6", "--repeats", "1")

    done = run("scale-out", "--trace", trace, *options, out=out)

    assert done.returncode == 0, done.stderr
    parts = [json.loads(line)["data"] for line in (out / "parts.jsonl").read_text().splitlines()]
    assert [part["forked"] for part in parts] == [False, True]
    assert parts[0]["text_tokens"] == parts[1]["text_tokens"] > 0
    assert (out / "report.html").is_file()
