"""Output of commands: errors, progress and report tables.

Progress is a bar on a terminal and plain lines elsewhere.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from apar_core.errors import AparError
from apar_core.installation import missing_extra

if TYPE_CHECKING:
    from apar_core.reporting import Report, ReportTable

_LINES_PER_STAGE = 10
_UNLIMITED = 10_000


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn expected errors into one line on standard error and exit code 1.

    Expected are this project's errors, those of files, and packages that are not installed.
    """
    try:
        yield
    except (AparError, OSError) as error:
        fail(str(error), error)
    except ModuleNotFoundError as error:
        if (message := missing_extra(error)) is None:
            raise
        fail(message, error)


def fail(message: str, cause: Exception | None = None) -> NoReturn:
    """Print an error and exit with code 1."""
    console = Console(stderr=True)
    console.print(f"[red]Error:[/red] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(1) from cause


def step_bars(console: Console, *columns: ProgressColumn) -> Progress:
    """Return progress bars with steps done, the given columns and the time left.

    Without a terminal nothing is drawn.
    """
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class StageProgress:
    """The stages of a run, one below the other."""

    def __init__(self, console: Console, bars: Progress) -> None:
        self._console = console
        self._bars = bars

    def start(self, stage: str, total: int, done: int = 0) -> Callable[[], None]:
        """Begin a stage, or continue it after `done` steps. Call the returned function per step."""
        if not self._console.is_terminal:
            return self._plain_lines(stage, total, done)
        task = self._bars.add_task(stage, total=total, completed=done)
        return lambda: self._bars.advance(task)

    def _plain_lines(self, stage: str, total: int, done: int) -> Callable[[], None]:
        before, started_at = done, time.monotonic()
        every = max(1, total // _LINES_PER_STAGE)

        def step() -> None:
            nonlocal done
            done += 1
            if done % every == 0 or done == total:
                left_s = (time.monotonic() - started_at) / (done - before) * (total - done)
                left = f", about {_rounded(left_s)} left" if left_s >= 1 else ""
                self._console.print(f"{stage}: {done} of {total}{left}", highlight=False)

        return step


class Rate(ProgressColumn):
    """Steps per second of a bar."""

    def render(self, task: Task) -> Text:
        """Return the rate of the last seconds, or nothing before the second step."""
        rate = task.finished_speed or task.speed
        return Text("" if rate is None else f"{rate:.1f}/s", style="progress.data.speed")


def _rounded(seconds: float) -> str:
    """Return a duration of at least a second in whole seconds, minutes, or tenths of hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextmanager
def stage_progress(*columns: ProgressColumn) -> Iterator[StageProgress]:
    """Show the stages of a run on standard error until the end of the block.

    Bars have the given columns too.
    vLLM logs errors only, unless VLLM_LOGGING_LEVEL is set: its messages would break the bars. So
    would the bars of transformers, if it has been imported.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    console = Console(stderr=True)
    with step_bars(console, *columns) as bars:
        yield StageProgress(console, bars)


def print_table(table: ReportTable) -> None:
    """Print a report's table in its full width, also where the terminal is narrower."""
    console, shown = Console(), _rich_table(table)
    full = Measurement.get(console, console.options.update(width=_UNLIMITED), shown).maximum
    Console(width=max(console.width, full)).print(shown)


def _rich_table(table: ReportTable) -> Table:
    shown = Table(title=escape(table.title), title_justify="left", box=box.SIMPLE, padding=(0, 1))
    for column, is_text in zip(table.columns, table.is_text, strict=True):
        shown.add_column(escape(column.title), justify="left" if is_text else "right")
    for row in table.shown_rows():
        shown.add_row(*map(escape, row))
    return shown


def show_report(report: Report, out: Path, *, hidden: Collection[str] = ()) -> None:
    """Write a report's files to `out`, and print its facts and its tables that are not hidden."""
    from apar_core.reporting import write_report

    page = write_report(report, out)
    console = Console()
    for name, fact in report.facts.items():
        console.print(f"[bold]{name}[/bold]: {escape(fact)}", highlight=False)
    for table in report.tables:
        if table.name not in hidden:
            print_table(table)
    console.print(f"Report: [bold]{escape(str(page))}[/bold]", soft_wrap=True)
