"""`apar data`: turns chats into training examples with forks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from cluster.cli.options import MODEL_HELP, Seed, out_option
from cluster.cli.terminal import clear_errors
from cluster.config.model import model_path

if TYPE_CHECKING:
    from apar_core.offline.data.prepare import PreparationReport, PreparationSettings
    from apar_core.offline.training.example_encoder import ContextFit

data = typer.Typer(no_args_is_help=True, help="Turn chats into training examples with forks.")

INTERRUPTED_EXIT_CODE = 130


@data.callback()
def _data() -> None:
    """Turn chats into training examples with forks."""


@data.command(no_args_is_help=True)
def prepare(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT", help="Files, or folders with .json and .jsonl files.", exists=True
        ),
    ],
    out: Annotated[Path, out_option("data-prepare", help="Output folder for examples and report.")],
    structured: Annotated[
        int, typer.Option(min=0, help="Number of structured examples to sample; 0 keeps all.")
    ] = 16_000,
    unstructured: Annotated[
        int, typer.Option(min=0, help="Number of unstructured examples to sample; 0 keeps all.")
    ] = 9_000,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"Model to train: {MODEL_HELP} Examples lose their oldest turns until they fit "
            "its context; longer ones are left out before sampling."
        ),
    ] = None,
    context_length: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --model: leave out examples longer than this with their prompt (tokens).",
        ),
    ] = 2048,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="With --model: Jinja chat template (default: the model's); give the same to "
            "`apar train`.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    hold_out: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of queries to keep out of training, with their answers, in "
            "held_out.jsonl: for `apar evaluate --prompts` or --replay, and --trace elsewhere.",
        ),
    ] = 0,
    seed: Seed = 0,
    question_file: Annotated[
        list[Path] | None,
        typer.Option(
            help="FastChat's questions for the FastChat answers among the inputs. Repeatable.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    unordered_lists: Annotated[
        bool,
        typer.Option(
            "--unordered-lists", help="Also fork at bullet points and headings; the paper does not."
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first item that cannot be used.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the files of an earlier run.")
    ] = False,
) -> None:
    """Turn chats into structured and unstructured examples by the rules of the APAR paper.

    Reads ShareGPT ([i]conversations[/i]), OpenAI ([i]messages[/i]), FastChat answers (with
    --question-file) and traces ([i]prompt[/i], [i]response[/i]), as JSON lines or one JSON array.
    Writes structured.jsonl, unstructured.jsonl and report.json; the report counts unusable items.
    Example:

    [bold]apar data prepare sharegpt.json --model lmsys/vicuna-7b-v1.3 --out out/data[/bold]
    """
    from apar_core.offline.data.prepare import PreparationSettings
    from apar_core.offline.data.structure import StructureRules

    settings = PreparationSettings(
        structured=structured or None,
        unstructured=unstructured or None,
        hold_out=hold_out,
        seed=seed,
        strict=strict,
        overwrite=overwrite,
        rules=StructureRules(unordered_lists=unordered_lists),
        questions=tuple(question_file or ()),
    )
    try:
        with clear_errors():
            fit = None if model is None else _context_fit(model, context_length, chat_template)
            report = _prepare_with_progress(inputs, out, settings, workers, fit)
    except KeyboardInterrupt as error:
        typer.echo("Interrupted; nothing was written.", err=True)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from error
    if not _print_report(report, out):
        raise typer.Exit(1)


def _context_fit(model: str, context_length: int, chat_template: Path | None) -> ContextFit:
    # Importing transformers takes seconds.
    from apar_core.offline.training.example_encoder import ContextFit

    fit = ContextFit(model_path(model), context_length, chat_template)
    fit.check()
    return fit


def _prepare_with_progress(
    inputs: list[Path],
    out: Path,
    settings: PreparationSettings,
    workers: int,
    fit: ContextFit | None,
) -> PreparationReport:
    from apar_core.offline.data.prepare import prepare as prepare_examples
    from apar_core.offline.data.sources import source_files

    total = sum(path.stat().st_size for path in source_files(inputs))
    console = Console(stderr=True)
    if not console.is_terminal:
        log = _ReadingLog(console, total)
        return prepare_examples(inputs, out, settings, workers, log.add, fit)
    with Progress(
        TextColumn("[bold]reading chats"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("", total=total)
        return prepare_examples(
            inputs, out, settings, workers, lambda num_bytes: progress.advance(task, num_bytes), fit
        )


class _ReadingLog:
    """Progress as plain lines, at most one per interval."""

    def __init__(self, console: Console, num_bytes: int, interval_s: float = 10.0) -> None:
        self._console = console
        self._num_bytes = num_bytes
        self._num_read = 0
        self._interval_s = interval_s
        self._logged_at = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count read bytes, and print a line if one is due."""
        self._num_read += num_bytes
        now = time.monotonic()
        if now - self._logged_at >= self._interval_s:
            self._logged_at = now
            self._console.print(
                f"read {self._num_read / 1e6:.0f} of {self._num_bytes / 1e6:.0f} MB",
                highlight=False,
            )


def _print_report(report: PreparationReport, out: Path) -> bool:
    """Print the report; return whether every file was read to its end and an answer was usable."""
    from apar_core.offline.data.sources import DAMAGED_ARRAY

    console = Console()
    table = Table("", "answers", "share", title=f"{report.num_items} items read")
    for kind, count in report.kinds.most_common():
        table.add_row(kind, str(count), f"{count / report.num_answers:.1%}")
    for reason, count in report.unstructured_reasons.most_common():
        table.add_row(f"  unstructured: {reason}", str(count), f"{count / report.num_answers:.1%}")
    console.print(table)
    if report.refusals:
        refused = Table("refused", "number", "first place")
        first = {refusal.reason: refusal for refusal in reversed(report.refusal_examples)}
        for reason, count in report.refusals.most_common():
            refused.add_row(reason, str(count), first[reason].place if reason in first else "")
        console.print(refused)
    for name, sample in (("structured", report.structured), ("unstructured", report.unstructured)):
        line = f"{name}: {sample.written} examples of {sample.found} found"
        if sample.wanted is not None and sample.found < sample.wanted:
            line += f" ({sample.wanted} wanted)"
        console.print(line, highlight=False)
    if report.held_out.wanted is not None:
        console.print(
            f"held out: {report.held_out.written} queries of {report.held_out.wanted} wanted; "
            f"{report.num_near_held_out} other examples share their conversation or query",
            highlight=False,
        )
    if report.context_length is None:
        console.print(
            "Without --model: examples may be longer than the model's context.", highlight=False
        )
    else:
        console.print(
            f"too long for {report.context_length} tokens: {report.num_too_long} answers",
            highlight=False,
        )
    if report.num_not_trained:
        console.print(f"not trained (weight 0): {report.num_not_trained} answers", highlight=False)
    if report.num_answers == 0:
        reason = (
            "The files contain no chats."
            if report.num_items == 0
            else "No answer could be used; see the reasons above."
        )
        console.print(f"[red]{reason} Nothing was written.[/red]")
        return False
    console.print(f"Written to [bold]{out}[/bold].", soft_wrap=True)
    damaged = [each for each in report.refusal_examples if each.reason == DAMAGED_ARRAY]
    for refusal in damaged:
        console.print(
            f"[red]{escape(refusal.place)}: {refusal.message}. What follows in this file is "
            "missing from the examples: repair the file.[/red]",
            soft_wrap=True,
        )
    return not damaged
