"""`apar experiment peers`: other ways of answering in parallel, in engines such as ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cluster.cli.evaluation_progress import clear_errors, rich_table, stage_progress

if TYPE_CHECKING:
    from apar_core.reporting import Report
    from cluster.experiments.peers.runs import PeerSettings

Trace = Annotated[
    Path, typer.Option(help="Recorded answers that fork: JSON lines with prompt and response.")
]
Out = Annotated[
    Path, typer.Option(help="Folder of runs and report; run again to go on.", file_okay=False)
]
Model = Annotated[str, typer.Option(help="cpu-7b or cpu-13b (random weights), or a checkpoint.")]

SideBySide = Annotated[
    bool | None,
    typer.Option(
        "--side-by-side/--one-engine",
        help="An engine for each way, which take turns of a few steps, so that a machine whose "
        "speed changes is the same to all; takes the memory of all. Default: with a CPU model.",
    ),
]


def peers(
    context: typer.Context,
    trace: Trace,
    out: Out = Path("out/experiments/peers"),
    model: Model = "cpu-7b",
    answers: Annotated[int, typer.Option(min=1, help="Answers, drawn at random.")] = 96,
    rounds: Annotated[
        int, typer.Option(min=1, help="Runs of each method at each share; a folder may get more.")
    ] = 2,
    side_by_side: SideBySide = None,
    kv_share: Annotated[
        list[float] | None, typer.Option(help="Share of the KV cache; repeatable: 0.3 and 0.9.")
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the whole KV cache.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer with its prompt; others are left out.")
    ] = None,
    max_requests: Annotated[
        int | None, typer.Option(min=1, help="Questions under way at once, kept by their clients.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="sequential, client-forking, skeleton, parent-stops, parent-stops-free, eager, "
            "adaptive; repeatable, all if absent."
        ),
    ] = None,
) -> None:
    """Compare ways of answering in parallel: same kind of engine, same answers, same KV memory.

    Sequential decoding; forking by the client; skeleton-of-thought; a parent that stops for its
    children; ours, eager and adaptive. The report has throughput, latency, steps, tokens computed
    again and peak KV. With --answers 32 --rounds 1 it takes 8 minutes on 2 idle cores, by default
    six times as long; an example of a few minutes:

    [bold]apar experiment peers --trace TRACE.jsonl --answers 16 --rounds 1 --kv-share 0.9[/bold]
    """
    from cluster.experiments.peers.experiment import run_peers

    with clear_errors(Console(stderr=True)):
        settings = _settings(context.params)
        with stage_progress(Console(stderr=True)) as progress:
            report = run_peers(settings, out, progress.start)
        show_report(report, out)


def _settings(options: dict[str, Any]) -> PeerSettings:
    """Settings by the names of the options; those that may be given again have a singular name."""
    from pydantic import ValidationError

    from apar_core.errors import EvaluationError, validation_summary
    from cluster.experiments.peers.runs import PeerSettings

    names = {"kv_share": "kv_shares", "method": "methods"}
    values = {
        names.get(name, name): value
        for name, value in options.items()
        # An option that is not given is None, or has no elements.
        if name != "out" and (value or value is False)
    }
    try:
        return PeerSettings(**values)
    except ValidationError as error:
        raise EvaluationError(validation_summary(error)) from error


def show_report(report: Report, out: Path) -> None:
    """Write a report's files, and print its facts and tables."""
    from apar_core.reporting import write_report

    page = write_report(report, out)
    console = Console()
    for name, fact in report.facts.items():
        console.print(f"[bold]{name}[/bold]: {fact}", highlight=False)
    for table in report.tables:
        console.print(rich_table(table))
    console.print(f"Report: [bold]{page}[/bold]", soft_wrap=True)
