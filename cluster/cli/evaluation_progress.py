"""How far an evaluation is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from apar_core.errors import AparError
from cluster.cli.progress_bars import step_bars

if TYPE_CHECKING:
    from apar_core.reporting import ReportTable

_LINES_PER_STAGE = 10


@contextmanager
def clear_errors(console: Console) -> Iterator[None]:
    """End the command with one line and exit code 1 on an error of this project or of a disk."""
    try:
        yield
    except (AparError, OSError) as error:
        console.print(f"[red]Error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from error


@dataclass(slots=True)
class _PlainStage:
    console: Console
    stage: str
    total: int
    done: int = 0

    def step(self) -> None:
        self.done += 1
        every = max(1, self.total // _LINES_PER_STAGE)
        if self.done % every == 0 or self.done == self.total:
            self.console.print(f"{self.stage}: {self.done} of {self.total}", highlight=False)


class StageProgress:
    """Shows the stages of a run one below the other."""

    def __init__(self, console: Console, bars: Progress) -> None:
        self._console = console
        self._bars = bars

    def start(self, stage: str, total: int) -> Callable[[], None]:
        """Begin a stage; call what it returns once a step."""
        if not self._console.is_terminal:
            return _PlainStage(self._console, stage, total).step
        task = self._bars.add_task(stage, total=total)
        return lambda: self._bars.advance(task)


@contextmanager
def stage_progress(console: Console) -> Iterator[StageProgress]:
    """Show stages until the end of the block."""
    with step_bars(console) as bars:
        yield StageProgress(console, bars)


def rich_table(table: ReportTable) -> Table:
    """Return a table of a report for the terminal."""
    shown = Table(title=escape(table.title), title_justify="left", box=box.SIMPLE, padding=(0, 1))
    for column, is_text in zip(table.columns, table.is_text, strict=True):
        shown.add_column(escape(column.title), justify="left" if is_text else "right")
    for row in table.shown_rows():
        shown.add_row(*map(escape, row))
    return shown
