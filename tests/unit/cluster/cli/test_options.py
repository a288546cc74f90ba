"""Option types that commands share: durations, comma-separated lists, the default --out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from cluster.cli.options import CommaList, Duration, duration_option, list_option, out_option

app = typer.Typer()


@app.command()
def command(
    out: Annotated[Path, out_option("test")],
    wait: Annotated[float, duration_option(help="Wait.", minimum="50ms")] = Duration.of("90s"),
    shares: Annotated[CommaList[float] | None, list_option(help="Shares.", item=float)] = None,
    counts: Annotated[
        CommaList[int], list_option(help="Counts.", item=int, minimum=1, default="1,2")
    ] = CommaList((1, 2)),
    names: Annotated[CommaList[str] | None, list_option(help="Names.", choices=("a", "b"))] = None,
) -> None:
    """Print the values."""
    typer.echo(f"{out} {wait!r} {shares} {counts} {names}")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, " ".join(result.output.split())


def test_values_reach_the_command() -> None:
    code, output = run(
        "--out", "o", "--wait", "1.5m", "--shares", "0.3, 0.9", "--counts", "4", "--names", "b,a"
    )

    assert code == 0
    assert output == "o 90.0 (0.3, 0.9) (4,) ('b', 'a')"


def test_defaults_are_shown_as_they_would_be_written() -> None:
    _, output = run("--help")
    for default in ("1.5m", "1,2", "out/test-DATE"):
        assert f"[default: {default}]" in output or f"[default: ({default})]" in output


def test_the_default_folder_has_the_date() -> None:
    code, output = run()

    assert code == 0
    assert re.fullmatch(r"out/test-\d{4}-\d\d-\d\d 90\.0 None \(1, 2\) None", output)


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--wait", "30", "'30' is not a duration: write a number and a unit, such as 2s, 50ms"),
        ("--wait", "-1s", "'-1s' is not a duration"),
        ("--wait", "inf", "'inf' is not a duration"),
        ("--wait", "49ms", "49ms is less than 50ms"),
        ("--shares", "0.3,x", "'x' is not a number"),
        ("--shares", "", "'' is not a number"),
        ("--counts", "1,2.5", "'2.5' is not a whole number"),
        ("--counts", "0,1", "0 is less than 1"),
        ("--names", "a,c", "'c' is not one of a, b"),
    ],
)
def test_a_wrong_value_is_named_with_its_option(option: str, value: str, problem: str) -> None:
    code, output = run(option, value)

    assert code == 2
    assert f"Invalid value for '{option}': {problem}" in output
