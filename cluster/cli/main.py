"""The `apar` command: one module per command or group of commands."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from cluster.cli import config, keys
from cluster.cli.convert import convert
from cluster.cli.data import data
from cluster.cli.doctor import doctor
from cluster.cli.evaluate import evaluate
from cluster.cli.experiment import experiment
from cluster.cli.fetch import fetch
from cluster.cli.generate import generate
from cluster.cli.help import use_help_pages
from cluster.cli.loadtest import loadtest
from cluster.cli.monitor import monitor
from cluster.cli.plan import plan
from cluster.cli.serve import rollout, serve
from cluster.cli.simulate import simulate
from cluster.cli.train import train, train_medusa, train_prompts, train_tiny

# Commands import Ray, torch and vLLM when they run: `apar --help` must be fast.
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    serve, rollout, monitor, plan, simulate, generate, convert, train, train_medusa, train_prompts,
    train_tiny, fetch, doctor,
):  # fmt: skip
    needs_options = command in (generate, simulate, convert, train, train_medusa, train_prompts)
    app.command(no_args_is_help=needs_options)(command)
app.add_typer(evaluate, name="evaluate")
app.add_typer(experiment, name="experiment")
app.add_typer(loadtest, name="loadtest")
app.add_typer(config.app, name="config")
app.add_typer(keys.app, name="keys")
app.add_typer(data, name="data")
use_help_pages(app)


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
    """Serve language models that write parts of their answers in parallel (APAR).

    Start with [bold]apar generate "Give me 5 tips for learning guitar." --show-threads[/bold],
    which needs no server, or with [bold]apar serve[/bold].
    """


if __name__ == "__main__":
    app()
