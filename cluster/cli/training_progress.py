"""How training commands show their steps: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import TextColumn

from apar_core.errors import AparError
from cluster.cli.progress_bars import step_bars

if TYPE_CHECKING:
    from apar_core.offline.training.tree_trainer import OnStep, StepReport

_SECONDS_BETWEEN_LINES = 10.0


@dataclass
class StepLines:
    """Prints a line now and then, and always the first and the last step."""

    console: Console
    interval_s: float = _SECONDS_BETWEEN_LINES
    started: float = field(default_factory=time.monotonic)
    printed: float = float("-inf")

    def show(self, report: StepReport) -> None:
        """Print this report unless a line has been printed just before."""
        now = time.monotonic()
        due = now - self.printed >= self.interval_s or report.validation_loss is not None
        if not due and report.step not in (1, report.num_steps):
            return
        self.printed = now
        self.console.print(
            f"step {report.step}/{report.num_steps}  {step_figures(report)}  "
            f"{now - self.started:.0f} s",
            highlight=False,
            soft_wrap=True,
        )


def step_figures(report: StepReport) -> str:
    """Return loss and throughput of a report in words."""
    parts = [f"loss {report.loss:.3f}"]
    if report.validation_loss is not None:
        parts.append(f"validation {report.validation_loss:.3f}")
    parts.append(f"{report.learned_tokens_per_s:,.0f} tokens/s")
    parts.append(f"{report.trees_per_s:.1f} trees/s")
    parts.append(f"padding {report.padding_share:.1%}")
    return "  ".join(parts)


def process_console() -> Console:
    """Return the console to print results on: of several processes only the first prints."""
    return Console(quiet=os.environ.get("RANK", "0") != "0")


@contextmanager
def step_progress(console: Console, title: str, num_steps: int) -> Iterator[OnStep]:
    """Yield what takes the reports of a run's steps and shows them."""
    if not console.is_terminal or console.quiet:
        yield StepLines(console).show
        return
    with step_bars(console, TextColumn("{task.fields[figures]}")) as bars:
        task = bars.add_task(title, total=num_steps, figures="")

        def show(report: StepReport) -> None:
            bars.update(task, completed=report.step, figures=step_figures(report))

        yield show


@contextmanager
def clear_training_errors(console: Console, *, resumable: Path | None = None) -> Iterator[None]:
    """End with one line and exit code 1 where something is not as it must be.

    Whoever interrupts a run that writes checkpoints to `resumable` is told how it goes on.
    """
    try:
        yield
    except KeyboardInterrupt:
        if resumable is not None:
            some = any(resumable.glob("checkpoints/checkpoint-*"))
            hint = "--resume goes on from the last checkpoint" if some else "no checkpoint yet"
            console.print(f"interrupted: {hint} in {resumable}", highlight=False, soft_wrap=True)
        raise
    except AparError as error:
        console.print(f"[bold red]error:[/bold red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def show_warnings(console: Console) -> None:
    """Show our own log from its warnings on; the libraries' chatter stays away."""
    handler = RichHandler(console=console, show_time=False, show_path=False)
    logging.getLogger("apar_core").addHandler(handler)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"peft\.")
    # Set before transformers is imported: its bars would break ours.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
