"""`apar train-tiny`: trains the embedded model from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from apar_core.training.train_tiny import StepReport


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]training apar-tiny"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def train_tiny(
    out: Annotated[
        Path, typer.Option(help="Folder that receives the checkpoint.", file_okay=False)
    ] = Path("out/apar-tiny"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; the recipe's number by default.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of split, corpus and weights.")] = 0,
    executors: Annotated[int, typer.Option(min=1, help="CPU threads to use.")] = 2,
) -> None:
    """Train the embedded APAR model from nothing (about 20 minutes on 2 cores).

    Writes a checkpoint that `apar serve --model FOLDER` serves. The same seed, steps and
    executors give the same weights on the same machine.
    """
    # Torch takes seconds to import, and `apar --help` should not wait for it.
    from apar_core.training.tiny_settings import TinyModelSettings, TinyTrainingSettings
    from apar_core.training.train_tiny import train_tiny as train

    settings = TinyTrainingSettings(seed=seed, num_executors=executors)
    if steps is not None:
        settings = settings.with_num_steps(steps)
    console = Console()
    with _progress(console) as progress:
        task = progress.add_task("", total=settings.num_steps, loss=float("nan"))

        def show(report: StepReport) -> None:
            progress.update(task, completed=report.step, loss=report.loss)

        train(out, TinyModelSettings(), settings, show)
    console.print(f"Checkpoint written to [bold]{out}[/bold].")
