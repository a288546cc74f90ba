from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app

RUNNER = CliRunner()


def refused(*arguments: str) -> str:
    result = RUNNER.invoke(app, ["experiment", *arguments], env={"COLUMNS": "250"})
    assert result.exit_code != 0
    return " ".join(result.output.split())


@pytest.mark.parametrize("command", ["fig5a", "fig5b", "table1", "table2", "all", "step-curve"])
def test_each_command_explains_itself(command: str) -> None:
    result = RUNNER.invoke(app, ["experiment", command, "--help"])

    assert result.exit_code == 0
    assert "--out" in result.output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--kv-shares", "0.5,1.5", "a share of the KV cache is at most 1, not 1.5"),
        ("--modes", "sequential,greedy", "--modes"),
        ("--concurrencies", "1,none", "--concurrencies"),
        ("--engine", "{enforce_eager", "'{enforce_eager' is no JSON"),
        ("--engine", "[1]", "is no JSON object"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    tmp_path: Path, option: str, value: str, message: str
) -> None:
    output = refused("fig5a", "--trace", "answers.jsonl", "--out", str(tmp_path), option, value)

    assert message in output


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"

    assert "none.jsonl" in refused("fig5a", "--trace", str(missing), "--out", str(tmp_path / "o"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1,x", "'x' is no number of rows"),
        ("1,", "'' is no number of rows"),
        ("0,2", "'0' is no number of rows"),
        ("8,8", "'8,8' has one number: a line takes two"),
    ],
)
def test_rows_of_the_step_curve_are_two_numbers_or_more(
    tmp_path: Path, rows: str, message: str
) -> None:
    out = tmp_path / "out"

    assert message in refused("step-curve", "--out", str(out), "--rows", rows)
    assert not out.exists()
