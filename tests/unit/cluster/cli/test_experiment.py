"""`apar experiment`: what its options mean and which are refused, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command

from apar_core.errors import EvaluationError
from cluster.cli.experiment import experiment
from cluster.lab.experiments.methods import PEER_METHODS
from cluster.lab.experiments.scale_out import ReplicasRun
from cluster.lab.experiments.settings import ExperimentSettings
from tests.fakes import apar_command

TRACE = '{"id": "a", "prompt": "How?", "response": "Ten."}\n'


def run(*arguments: str | Path) -> tuple[int, str]:
    return apar_command.run("experiment", *arguments)


@pytest.mark.parametrize("command", get_command(experiment).commands)  # type: ignore[attr-defined]
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
        ("--methods", "eager", "sequential must be among the methods"),
        ("--gpu", "a100-80gb,b9000", "unknown GPU 'b9000'"),
        ("--engine", "imagined", "'imagined' is not one of virtual, real"),
        (
            "--concurrency",
            "1,none",
            "Invalid value for '--concurrency': 'none' is not a whole number",
        ),
        ("--concurrency", "1,0", "0 is less than 1"),
        ("--sample-every", "3", "'3' is not a duration: write a number and a unit, such as 2s"),
        ("--engine-args", "{enforce_eager", "'{enforce_eager' is not JSON"),
        ("--engine-args", "[1]", "'[1]' is not a JSON object"),
        ("--engine-args", '{"enforce": true}', "vLLM has no engine argument 'enforce'"),
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


@pytest.mark.parametrize(
    "command", ["joins", "goodput", "scheduler-cost", "family-attention", "fig5a"]
)
def test_an_unknown_gpu_is_named_with_the_known_ones(command: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)

    code, output = run(
        command, "--trace", trace, "--out", str(tmp_path / "out"), "--gpu", "a100-8gb"
    )

    assert code == 2
    assert "Invalid value for '--gpu': unknown GPU 'a100-8gb': known are" in output
    assert "did you mean a100-80gb?" in output


@pytest.mark.parametrize("command", ["fig5a", "peers", "all"])
def test_options_become_settings_and_unset_ones_keep_the_defaults(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ExperimentSettings] = []

    def run_experiment(name: str, settings: ExperimentSettings, *_: object, **__: object) -> None:
        assert name == command
        made.append(settings)
        raise EvaluationError("stop here")

    monkeypatch.setattr("cluster.lab.experiments.report.run_experiment", run_experiment)
    given = (command, "--trace", "t", "--out", str(tmp_path))

    code, output = run(*given)
    run(*given, "--kv-shares", "0.2,0.9", "--sample-every", "500ms", "--gpu", "H100,A100-SXM4-80GB")

    assert (code, "stop here" in output) == (1, True)
    assert made[0] == ExperimentSettings(trace=Path("t"))
    assert made[0].peer_methods == PEER_METHODS
    assert (made[1].kv_shares, made[1].peer_shares) == ((0.2, 0.9), (0.2, 0.9))
    assert (made[1].sample_s, made[1].gpus) == (0.5, ("h100", "a100-80gb"))


def test_a_missing_trace_of_a_figure_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"

    code, output = run("fig5a", "--trace", str(missing), "--out", str(tmp_path / "o"))

    assert code == 1
    assert "none.jsonl" in output


def test_a_missing_trace_of_scale_out_is_named_before_anything_is_served(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"

    code, output = run("scale-out", "--trace", str(missing), "--out", str(tmp_path / "out"))

    assert code == 2
    assert f"Invalid value for '--trace': no file {missing}" in output
    assert not (tmp_path / "out").exists()


def test_the_report_of_scale_out_shows_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(settings: object, replicas: int, *_: object) -> list[ReplicasRun]:
        figures = dict.fromkeys(("duration_s", "latency_mean_s", "server_cpu_s", "client_cpu_s"), 1)
        return [
            ReplicasRun(replicas=replicas, forked=forked, text_tokens=100, **figures)
            for forked in (False, True)
        ]

    monkeypatch.setattr("cluster.lab.experiments.scale_out.run_replicas", serve)
    out = tmp_path / "out"
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)

    code, output = run(
        "scale-out",
        "--trace",
        str(trace),
        "--out",
        str(out),
    )

    assert code == 0
    assert "More replicas: predicted by" in output
    assert "(scale-out.png)" in (out / "report.md").read_text()
