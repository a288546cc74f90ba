"""Options of the benchmarks follow the conventions of the command line."""

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks.__main__ import app

COMMANDS = {
    "decoding",
    "decoders",
    "family-grouping",
    "lists",
    "metrics",
    "prompt-chain",
    "serving",
    "training",
}


def test_every_benchmark_is_a_command() -> None:
    assert set(get_command(app).commands) == COMMANDS  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_results_go_to_a_dated_folder(name: str) -> None:
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    [out] = [option for option in command.params if option.name == "out"]

    assert out.opts == ["--out"]
    assert out.show_default == f"out/{name}-DATE"


def test_a_missing_trace_is_an_error() -> None:
    result = CliRunner().invoke(app, ["training", "--trace", "nowhere.jsonl"])

    assert result.exit_code == 2
    assert "nowhere.jsonl does not exist" in result.output
