"""`apar train-tiny`: trains the embedded model, or its Medusa heads, from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli.train_medusa import print_accuracy
from cluster.cli.training_progress import clear_training_errors, show_warnings, step_progress


def train_tiny(
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder that receives the checkpoint; out/apar-tiny by default.", file_okay=False
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; the recipe's number by default.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of split, corpus and weights.")] = 0,
    executors: Annotated[int, typer.Option(min=1, help="CPU threads to use.")] = 2,
    recipe: Annotated[
        str | None, typer.Option(help="A YAML file in the place of the shipped recipe.")
    ] = None,
    medusa: Annotated[
        bool,
        typer.Option("--medusa", help="Train Medusa heads for the embedded model instead."),
    ] = False,
) -> None:
    """Train the embedded APAR model from nothing (16 minutes on 2 cores).

    Writes a checkpoint that `apar serve --model FOLDER` serves. The same seed, steps and
    executors give the same weights on the same machine.
    """
    console = Console()
    show_warnings(Console(stderr=True))
    with clear_training_errors(Console(stderr=True)):
        if medusa:
            folder = out if out is not None else Path("out/apar-tiny-medusa")
            _train_heads(console, folder, steps, seed, executors, recipe)
        else:
            folder = out if out is not None else Path("out/apar-tiny")
            _train_model(console, folder, steps, seed, executors, recipe)
    console.print(f"Written to [bold]{folder}[/bold].", soft_wrap=True)


def _train_model(
    console: Console, out: Path, steps: int | None, seed: int, executors: int, recipe: str | None
) -> None:
    # Torch takes seconds to import, and `apar --help` should not wait for it.
    from apar_core.offline.training.train_tiny import TinyModelSettings, tiny_recipe
    from apar_core.offline.training.train_tiny import train_tiny as train

    settings = tiny_recipe(recipe or "apar-tiny").model_copy(
        update={"seed": seed, "num_executors": executors}
    )
    if steps is not None:
        settings = settings.with_num_steps(steps)
    with step_progress(console, "training apar-tiny", settings.num_steps) as show:
        train(out, TinyModelSettings(), settings, show)


def _train_heads(
    console: Console, out: Path, steps: int | None, seed: int, executors: int, recipe: str | None
) -> None:
    import torch

    from apar_core.models.apar_tiny import checkpoint_path
    from apar_core.offline.speculation.train_medusa import (
        tiny_medusa_recipe,
        train_tiny_medusa,
    )

    torch.set_num_threads(executors)
    settings = tiny_medusa_recipe(recipe or "apar-tiny-medusa")
    changes: dict[str, int] = {"seed": seed} | ({} if steps is None else {"num_steps": steps})
    settings = settings.model_copy(update={"recipe": settings.recipe.model_copy(update=changes)})
    with step_progress(console, "training heads", settings.recipe.num_steps) as show:
        accuracy = train_tiny_medusa(checkpoint_path(), out, settings, show)
    print_accuracy(console, tuple(accuracy))
