"""The experiments beside the paper's own: what they refuse, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from apar_core.errors import EvaluationError
from cluster.cli.experiment_costs import scheduler_cost
from cluster.cli.experiment_peers import peers
from cluster.cli.experiment_scale_out import scale_out
from cluster.experiments.peers.methods import METHODS
from cluster.experiments.peers.runs import PeerSettings
from cluster.experiments.scale_out import ReplicasRun

TRACE = '{"id": "a", "prompt": "How?", "response": "Ten."}\n'


def run(command: object, *arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command)  # type: ignore[type-var]
    result = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(app, list(arguments))
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "sequential", "--method", "magic"), "no method magic"),
        (("--method", "eager"), "sequential must be among the methods"),
        (("--kv-share", "1.5"), "at most 1, not 1.5"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)

    code, output = run(peers, "--trace", str(trace), "--out", str(tmp_path / "out"), *options)

    assert code == 1
    assert message in output
    assert not (tmp_path / "out").exists()


def test_options_that_are_not_given_leave_the_settings_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PeerSettings] = []

    def run_peers(settings: PeerSettings, *_: object) -> None:
        made.append(settings)
        raise EvaluationError("stop here")

    monkeypatch.setattr("cluster.experiments.peers.experiment.run_peers", run_peers)

    code, output = run(peers, "--trace", str(tmp_path / "t"), "--out", str(tmp_path / "out"))

    assert (code, "stop here" in output) == (1, True)
    assert (made[0].methods, made[0].kv_shares) == (tuple(METHODS), (0.3, 0.9))
    assert made[0].max_requests == PeerSettings(trace=tmp_path / "t").max_requests


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    code, output = run(peers, "--trace", str(tmp_path / "none"), "--out", str(tmp_path / "out"))

    assert code == 1
    assert "none cannot be read" in output


def test_threads_that_do_not_make_whole_requests_are_refused() -> None:
    code, output = run(scheduler_cost, "--threads", "2001", "--threads-per-request", "8")

    assert code == 2
    assert "--threads 2001 is no multiple of --threads-per-request 8" in output


def test_a_simulated_model_that_is_not_there_is_named_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[object] = []

    def serve(*given: object) -> list[object]:
        served.append(given)
        return []

    monkeypatch.setattr("cluster.experiments.scale_out.run_replicas", serve)
    for name in ("traces", "arrivals"):
        (tmp_path / name).mkdir()
    options = ("--data", str(tmp_path), "--simulated-model", "70b-roofline")

    code, output = run(scale_out, "--trace", "t", "--out", str(tmp_path / "out"), *options)

    assert code == 1
    assert "--simulated-model '70b-roofline': there are 7b-roofline, tiny-measured" in output
    assert not served
    assert not (tmp_path / "out").exists()


def test_without_recordings_the_report_says_what_the_simulation_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(settings: object, replicas: int, *_: object) -> list[ReplicasRun]:
        figures = dict.fromkeys(("duration_s", "latency_mean_s", "server_cpu_s", "client_cpu_s"), 1)
        return [
            ReplicasRun(replicas=replicas, forked=forked, text_tokens=100, **figures)
            for forked in (False, True)
        ]

    monkeypatch.setattr("cluster.experiments.scale_out.run_replicas", serve)
    out = tmp_path / "out"

    code, output = run(
        scale_out, "--trace", "t", "--out", str(out), "--data", str(tmp_path / "none")
    )

    assert code == 0
    assert "More replicas: not simulated: in the repository" in output
    assert "(scale-out.png)" in (out / "report.md").read_text()


@pytest.mark.parametrize("command", [peers, scheduler_cost, scale_out])
def test_help_has_an_example(command: object) -> None:
    code, output = run(command, "--help")

    assert code == 0
    assert "apar experiment" in output
