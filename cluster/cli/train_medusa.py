"""`apar train-medusa`: trains Medusa heads on a frozen APAR model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli.training_progress import (
    clear_training_errors,
    process_console,
    show_warnings,
    step_progress,
)
from cluster.config.model import PRESETS, ModelConfig


def train_medusa(
    model: Annotated[
        str,
        typer.Option(help=f"APAR checkpoint: a folder, a hub name or one of {', '.join(PRESETS)}."),
    ],
    data: Annotated[
        Path, typer.Option(help="What `apar data prepare` wrote: its folder, or a file of it.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the heads and the log.", file_okay=False)],
    recipe: Annotated[
        str, typer.Option(help="A shipped recipe's name, or a YAML file.")
    ] = "medusa",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps; the recipe's number by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")
    ] = False,
) -> None:
    """Train Medusa heads on a frozen APAR model, by Table 6 of the APAR paper.

    Writes them in the form that vLLM's medusa method and the decoder medusa_apar load.
    """
    console = process_console()
    show_warnings(Console(stderr=True))
    with clear_training_errors(Console(stderr=True), resumable=out):
        from apar_core.offline.training.recipe import MedusaRecipe, load_recipe

        settings = load_recipe(recipe, MedusaRecipe)
        if steps is not None:
            settings = settings.model_copy(update={"num_steps": steps})
        from apar_core.offline.speculation.train_medusa import train_medusa as train

        with step_progress(console, "training heads", settings.num_steps) as show:
            path = ModelConfig(checkpoint=model).preset.path
            result = train(path, data, out, settings, resume=resume, on_step=show)
    console.print(f"{result.counts}; {result.padding}.", highlight=False, soft_wrap=True)
    print_accuracy(console, result.accuracy)
    console.print(f"Medusa heads written to [bold]{out}[/bold].", soft_wrap=True)


def print_accuracy(console: Console, accuracy: tuple[float, ...]) -> None:
    """Say how often each head puts the right token first."""
    for head, share in enumerate(accuracy):
        console.print(
            f"Head {head} (token {head + 2} ahead): {share:.1%} right on held-out trees.",
            highlight=False,
        )
