"""The `apar` command in this process, or as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from cluster.cli.main import app

APAR = (sys.executable, "-m", "cluster.cli.main")
"""The command line of a process that runs `apar`."""


def apar(*arguments: str | Path, stdin: str | None = None) -> Result:
    """Run `apar` with these arguments in this process, with wide output and without colors.

    Exceptions that the command does not handle are raised.
    """
    environment = {"COLUMNS": "300", "TERM": "dumb"}
    runner = CliRunner(env=environment)
    return runner.invoke(app, list(map(str, arguments)), input=stdin, catch_exceptions=False)


def run(*arguments: str | Path) -> tuple[int, str]:
    """Run `apar`, and return the exit code and the output with single spaces."""
    result = apar(*arguments)
    return result.exit_code, " ".join(result.output.split())
