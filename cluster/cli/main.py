"""The `apar` command; every subcommand has a module of its own here."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from cluster.cli import config, keys
from cluster.cli.data import data
from cluster.cli.doctor import doctor
from cluster.cli.evaluate import evaluate
from cluster.cli.experiment import experiment
from cluster.cli.generate import generate
from cluster.cli.loadtest import loadtest
from cluster.cli.monitor import monitor
from cluster.cli.plan import plan
from cluster.cli.rollout import rollout
from cluster.cli.serve import serve
from cluster.cli.train import train
from cluster.cli.train_medusa import train_medusa
from cluster.cli.train_tiny import train_tiny

# Subcommands import engine, Ray and torch when they run: `apar --help` has to answer at once.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    serve, rollout, monitor, plan, generate, train, train_medusa, train_tiny, doctor,
):  # fmt: skip
    app.command(no_args_is_help=command in (generate, train, train_medusa))(command)
app.add_typer(evaluate, name="evaluate")
app.add_typer(experiment, name="experiment")
app.add_typer(loadtest, name="loadtest")
app.add_typer(config.app, name="config")
app.add_typer(keys.app, name="keys")
app.add_typer(data, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"apar-serve {version('apar-serve')}")
        raise typer.Exit


@app.callback()
def apar(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve language models that parallelise their own answers (APAR).

    Start with [bold]apar generate "Give me 5 tips for learning guitar." --show-threads[/bold],
    which needs no server, or with [bold]apar serve[/bold].
    """
