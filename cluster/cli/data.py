"""`apar data`: turns chats into training examples with forks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from cluster.config.model import PRESETS, ModelConfig

if TYPE_CHECKING:
    from apar_core.offline.data.prepare import PreparationReport, PreparationSettings
    from apar_core.offline.training.example_encoder import ContextFit

data = typer.Typer(no_args_is_help=True, help="Turn chats into training examples with forks.")

INTERRUPTED_EXIT_CODE = 130

Inputs = Annotated[
    list[Path],
    typer.Argument(
        metavar="INPUT", help="Files, or folders of .json and .jsonl files.", exists=True
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for examples and report.", file_okay=False)]
Structured = Annotated[
    int, typer.Option(min=0, help="Sample so many structured examples; 0: keep all.")
]
Unstructured = Annotated[
    int, typer.Option(min=0, help="Sample so many unstructured examples; 0: keep all.")
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model to train: a folder, a hub name or one of "
        f"{', '.join(PRESETS)}. Examples lose their oldest turns until they fit its context, and "
        "longer ones are left out before sampling."
    ),
]
ContextLength = Annotated[
    int, typer.Option(min=1, help="Longest example with --model (tokens); 2048 in the recipe apar.")
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        help="Jinja chat template to use with --model instead of its own; give the same to "
        "apar train.",
        exists=True,
        dir_okay=False,
    ),
]
HoldOutQueries = Annotated[
    int,
    typer.Option(
        "--hold-out",
        min=0,
        help="Keep so many queries with their answers out of training, in held_out.jsonl: for "
        "apar evaluate --prompts or --replay, and apar experiment --trace.",
    ),
]
QuestionFiles = Annotated[
    list[Path] | None,
    typer.Option(
        help="FastChat question file that answer files belong to; may be repeated.",
        exists=True,
        dir_okay=False,
    ),
]
UnorderedLists = Annotated[
    bool,
    typer.Option(
        "--unordered-lists",
        help="Fork at bullet points and headings too, which the paper does not.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at the first item that cannot be used.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the files of an earlier run.")
]


@data.callback()
def _data() -> None:
    """Turn chats into training examples with forks."""


@data.command(no_args_is_help=True)
def prepare(
    inputs: Inputs,
    out: Out,
    structured: Structured = 16_000,
    unstructured: Unstructured = 9_000,
    model: Model = None,
    context_length: ContextLength = 2048,
    chat_template: ChatTemplate = None,
    hold_out: HoldOutQueries = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    questions: QuestionFiles = None,
    unordered_lists: UnorderedLists = False,
    strict: Strict = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes to use.")] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Turn chats into structured and unstructured examples by the rules of the APAR paper.

    Understands ShareGPT ([i]conversations[/i]), OpenAI ([i]messages[/i]), FastChat answers (with
    --questions) and traces ([i]prompt[/i], [i]response[/i]), as JSON lines or one JSON array.
    Writes structured.jsonl, unstructured.jsonl and report.json. What cannot be used is counted.
    """
    from apar_core.errors import AparError
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
        questions=tuple(questions or ()),
    )
    errors = Console(stderr=True)
    try:
        fit = None if model is None else _context_fit(model, context_length, chat_template)
        report = _prepare_with_progress(inputs, out, settings, workers, fit)
    except (AparError, OSError) as error:
        errors.print(f"apar data prepare: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        errors.print("apar data prepare: interrupted; nothing was written", markup=False)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from error
    _print_report(report, out)


def _context_fit(model: str, context_length: int, chat_template: Path | None) -> ContextFit:
    # Transformers takes seconds to import.
    from apar_core.offline.training.example_encoder import ContextFit

    fit = ContextFit(ModelConfig(checkpoint=model).preset.path, context_length, chat_template)
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
    """Plain lines where no progress bar can be drawn, not too many of them."""

    def __init__(self, console: Console, num_bytes: int, interval_s: float = 10.0) -> None:
        self._console = console
        self._num_bytes = num_bytes
        self._num_read = 0
        self._interval_s = interval_s
        self._logged_at = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count what was read and print a line if the last one is old."""
        self._num_read += num_bytes
        now = time.monotonic()
        if now - self._logged_at >= self._interval_s:
            self._logged_at = now
            self._console.print(
                f"read {self._num_read / 1e6:.0f} of {self._num_bytes / 1e6:.0f} MB",
                highlight=False,
            )


def _print_report(report: PreparationReport, out: Path) -> None:
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
        console.print("No --model: examples may be longer than its context.", highlight=False)
    else:
        console.print(
            f"too long for {report.context_length} tokens: {report.num_too_long} answers",
            highlight=False,
        )
    if report.num_items == 0:
        console.print("[yellow]The files hold no chats.[/yellow]")
    elif report.num_answers == 0:
        console.print("[yellow]No answer could be used; see the reasons above.[/yellow]")
    console.print(f"Written to [bold]{out}[/bold].", soft_wrap=True)
