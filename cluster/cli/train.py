"""`apar train`: fine-tunes a causal language model to fork."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cluster.cli.training_progress import (
    clear_training_errors,
    process_console,
    show_warnings,
    step_progress,
)
from cluster.config.model import PRESETS, ModelConfig

if TYPE_CHECKING:
    from apar_core.offline.training.fine_tune import TrainingResult


def train(
    model: Annotated[
        str,
        typer.Option(
            help=f"What to start from: a folder, a hub name or one of {', '.join(PRESETS)}."
        ),
    ],
    data: Annotated[
        Path, typer.Option(help="What `apar data prepare` wrote: its folder, or a file of it.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the checkpoint and the log.", file_okay=False)
    ],
    recipe: Annotated[str, typer.Option(help="A shipped recipe's name, or a YAML file.")] = "apar",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps; the recipe's number by default.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="Jinja file; by default the tokenizer's own, or else Vicuna's."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")
    ] = False,
) -> None:
    """Fine-tune a model to parallelise its answers, by Table 5 of the APAR paper.

    Writes a checkpoint that `apar serve --model OUT` takes. On several GPUs:
    [bold]accelerate launch --config_file apar_core/offline/training/fsdp.yaml --no_python apar
    train
    ...[/bold]
    """
    console = process_console()
    show_warnings(Console(stderr=True))
    with clear_training_errors(Console(stderr=True), resumable=out):
        # Torch takes seconds to import, and `apar --help` should not wait for it.
        from apar_core.offline.training.recipe import TrainingRecipe, load_recipe

        settings = load_recipe(recipe, TrainingRecipe)
        if steps is not None:
            settings = settings.model_copy(update={"num_steps": steps})
        from apar_core.offline.training.fine_tune import fine_tune

        with step_progress(console, "training", settings.num_steps) as show:
            result = fine_tune(
                ModelConfig(checkpoint=model).preset.path, data, out, settings,
                chat_template=chat_template, resume=resume, on_step=show,
            )  # fmt: skip
    _print_result(console, result)
    console.print(f"Checkpoint written to [bold]{out}[/bold].", soft_wrap=True)


def _print_result(console: Console, result: TrainingResult) -> None:
    console.print(f"{result.counts}; {result.padding}.", highlight=False, soft_wrap=True)
    if result.validation_loss is not None:
        console.print(
            f"Validation loss {result.validation_loss:.4f} on {result.num_validation} examples.",
            highlight=False,
        )
