"""`apar experiment`: what its options mean and which are refused, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.experiments.peers.methods import METHODS
from cluster.experiments.peers.runs import PeerSettings

from apar_core.errors import EvaluationError
from cluster.experiments.scale_out import ReplicasRun
from cluster.experiments.settings import ExperimentSettings
from tests.fakes import apar_command

TRACE = '{"id": "a", "prompt": "How?", "response": "Ten."}\n'


def run(*arguments: str | Path) -> tuple[int, str]:
    return apar_command.run("experiment", *arguments)


@pytest.mark.parametrize(
    "command",
    [
        "fig5a", "fig5b", "table1", "table2", "all", "step-curve", "peers", "fork-cost",
        "profile", "scheduler-cost", "scale-out",
    ],
)  # fmt: skip
def test_each_command_explains_itself(command: str) -> None:
    code, output = run(command, "--help")

    assert code == 0
    assert f"apar experiment {command}" in output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--kv-shares", "0.5,1.5", "a share of the KV cache is at most 1, not 1.5"),
        ("--kv-shares", "0,0.5", "Input should be greater than 0 (got 0.0)"),
        ("--token-time-multiple", "-1", "Input should be greater than 0 (got -1.0)"),
        ("--methods", "sequential,greedy", "'greedy' is not one of sequential, eager, adaptive"),
        (
            "--concurrency",
            "1,none",
            "Invalid value for '--concurrency': 'none' is not a whole number",
        ),
        ("--concurrency", "1,0", "0 is less than 1"),
        ("--sample-every", "3", "'3' is not a duration: write a number and a unit, such as 2s"),
        ("--engine", "{enforce_eager", "'{enforce_eager' is not JSON"),
        ("--engine", "[1]", "'[1]' is not a JSON object"),
        ("--engine", '{"enforce": true}', "vLLM has no engine argument 'enforce'"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    tmp_path: Path, option: str, value: str, message: str
) -> None:
    given = ("--trace", "answers.jsonl", "--out", str(tmp_path), option, value)
    code, output = run("fig5a", *given)

    assert code == 2
    assert f"Invalid value for '{option}': " in output
    assert message in output
    assert output.count(value) <= 1


def test_the_concurrency_is_the_points_of_figure_5b_and_the_limit_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ExperimentSettings] = []

    def run_experiments(names: object, settings: ExperimentSettings, *_: object) -> list[Path]:
        made.append(settings)
        return []

    monkeypatch.setattr("cluster.experiments.run.run_experiments", run_experiments)
    given = ("--trace", "t", "--out", str(tmp_path), "--sample-every", "500ms")

    assert run("all", *given, "--concurrency", "1,8,2", "--kv-shares", "0.2,0.9")[0] == 0
    assert run("fig5a", *given)[0] == 0

    assert (made[0].concurrencies, made[0].max_requests) == ((1, 8, 2), 8)
    assert (made[0].kv_shares, made[0].sample_s) == ((0.2, 0.9), 0.5)
    assert made[1].max_requests == ExperimentSettings(trace=Path("t")).max_requests


def test_a_missing_trace_of_a_figure_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"

    code, output = run("fig5a", "--trace", str(missing), "--out", str(tmp_path / "o"))

    assert code == 1
    assert "none.jsonl" in output


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1,x", "'x' is not a whole number"),
        ("1,", "'' is not a whole number"),
        ("0,2", "0 is less than 1"),
        ("8,8", "Invalid value for '--rows': give two different numbers or more"),
    ],
)
def test_rows_of_the_step_curve_are_two_numbers_or_more(
    tmp_path: Path, rows: str, message: str
) -> None:
    out = tmp_path / "out"

    assert message in run("step-curve", "--out", str(out), "--rows", rows)[1]
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--methods", "sequential,magic"), "no method magic"),
        (("--methods", "eager"), "sequential must be among the methods"),
        (
            ("--kv-shares", "0.3,1.5"),
            "'--kv-shares': a share of the KV cache is at most 1, not 1.5",
        ),
        (("--kv-shares", "0.3,x"), "Invalid value for '--kv-shares': 'x' is not a number"),
    ],
)
def test_methods_and_shares_of_peers_are_checked(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)

    code, output = run("peers", "--trace", str(trace), "--out", str(tmp_path / "out"), *options)

    assert code == 2
    assert message in output
    assert not (tmp_path / "out").exists()


def test_unset_options_keep_the_defaults_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PeerSettings] = []

    def run_peers(settings: PeerSettings, *_: object) -> None:
        made.append(settings)
        raise EvaluationError("stop here")

    monkeypatch.setattr("cluster.experiments.peers.experiment.run_peers", run_peers)

    code, output = run("peers", "--trace", str(tmp_path / "t"), "--out", str(tmp_path / "out"))

    assert (code, "stop here" in output) == (1, True)
    assert (made[0].methods, made[0].kv_shares) == (tuple(METHODS), (0.3, 0.9))
    assert made[0].max_requests == PeerSettings(trace=tmp_path / "t").max_requests


def test_a_missing_trace_of_peers_is_named(tmp_path: Path) -> None:
    code, output = run("peers", "--trace", str(tmp_path / "none"), "--out", str(tmp_path / "out"))

    assert code == 1
    assert "none cannot be read" in output


def test_threads_must_be_a_multiple_of_those_per_request() -> None:
    code, output = run("scheduler-cost", "--threads", "2001", "--threads-per-request", "8")

    assert code == 2
    assert "--threads 2001 is not a multiple of --threads-per-request 8" in output


def test_an_unknown_simulated_model_is_named_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[object] = []

    def serve(*given: object) -> list[object]:
        served.append(given)
        return []

    monkeypatch.setattr("cluster.experiments.scale_out.run_replicas", serve)
    for name in ("traces", "arrivals"):
        (tmp_path / name).mkdir()
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    options = ("--simulation-data", str(tmp_path), "--simulated-model", "70b-roofline")

    code, output = run("scale-out", "--trace", str(trace), "--out", str(tmp_path / "out"), *options)

    assert code == 1
    assert "--simulated-model '70b-roofline': there are 7b-roofline, tiny-measured" in output
    assert not served
    assert not (tmp_path / "out").exists()


def test_a_missing_trace_of_scale_out_is_named_before_anything_is_served(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"

    code, output = run("scale-out", "--trace", str(missing), "--out", str(tmp_path / "out"))

    assert code == 2
    assert f"Invalid value for '--trace': no file {missing}" in output
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
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)

    code, output = run(
        "scale-out",
        "--trace",
        str(trace),
        "--out",
        str(out),
        "--simulation-data",
        str(tmp_path / "none"),
    )

    assert code == 0
    assert "More replicas: not simulated: in the repository" in output
    assert "(scale-out.png)" in (out / "report.md").read_text()
