"""`apar loadtest`: load on an OpenAI-compatible server, measured; runs side by side."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from apar_core.errors import EvaluationError
from cluster.cli.evaluation_progress import clear_errors, rich_table
from cluster.cli.loadtest_options import (
    ApiKey,
    ArrivalsSpec,
    ContextTokens,
    ExtraBody,
    Flat,
    IgnoreEos,
    LongestS,
    MaxTokens,
    Metrics,
    ModelName,
    Out,
    Questions,
    Repeats,
    Requests,
    SampleS,
    SaveAnswers,
    Seed,
    SettleS,
    Slo,
    TargetUrl,
    Temperature,
    TimeoutS,
    Tokenizer,
    WarmUp,
    Workload,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from apar_core.reporting import Report
    from cluster.loadtest.jobs import Target
    from cluster.loadtest.run_file import LoadSettings, Run

loadtest = typer.Typer(rich_markup_mode="rich")


@loadtest.callback(invoke_without_command=True, no_args_is_help=True)
def run_load_test(
    context: typer.Context,
    target: TargetUrl = None,
    workload: Workload = None,
    arrivals: ArrivalsSpec = "all",
    flat: Flat = False,
    requests: Requests = None,
    longest_s: LongestS = None,
    repeats: Repeats = 1,
    model: ModelName = None,
    api_key: ApiKey = None,
    tokenizer: Tokenizer = None,
    context_tokens: ContextTokens = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    ignore_eos: IgnoreEos = False,
    extra_body: ExtraBody = None,
    questions: Questions = None,
    slo: Slo = None,
    metrics: Metrics = None,
    sample_s: SampleS = 3.0,
    settle_s: SettleS = 11.0,
    timeout_s: TimeoutS = 600.0,
    warm_up: WarmUp = 1,
    seed: Seed = 0,
    out: Out = None,
    save_answers: SaveAnswers = None,
) -> None:
    """Put load on any OpenAI-compatible server and measure what its clients see.

    Ctrl-C ends a run in order, with what there is. Exit code 1 if no request succeeded. Examples:

    [bold]apar loadtest --target http://127.0.0.1:8000 --workload prompts:held-out --arrivals
    closed:16[/bold]

    [bold]apar loadtest --target http://127.0.0.1:8000 --workload replay:trace.jsonl --repeats 3
    --metrics 127.0.0.1:9464 --slo ttft=2s,e2e=30s --out out/forked[/bold]

    [bold]apar loadtest compare out/flat out/forked[/bold]
    """
    if context.invoked_subcommand is None:
        with clear_errors(Console(stderr=True)):
            _load(context.params)


@loadtest.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs; ratios are over the first one.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the report.", file_okay=False)] = Path(
        "out/loadtest/compared"
    ),
) -> None:
    """Show runs side by side: every figure, and its ratio to the first run's, with intervals.

    Example: [bold]apar loadtest compare out/flat out/forked --out out/compared[/bold]
    """
    from cluster.loadtest.report import compared
    from cluster.loadtest.run_file import read_run

    with clear_errors(Console(stderr=True)):
        _show(compared([read_run(path) for path in runs]), out)


def _load(options: Mapping[str, Any]) -> None:
    """Run a load test as the options say, and write and show its report."""
    # These take a second to import, and `apar --help` should not wait for them.
    from apar_core.workload.arrivals import parse
    from cluster.loadtest.jobs import Target, build_jobs, find_model
    from cluster.loadtest.live_view import LiveView
    from cluster.loadtest.load_run import LoadRun, run_in_loop
    from cluster.loadtest.report import run_report
    from cluster.loadtest.run_file import AnswerFile, RunFolder, read_run
    from cluster.monitor.sources import PagesSource

    for name in ("target", "workload"):
        if options[name] is None:
            raise EvaluationError(f"--{name} is missing")
    arrivals = parse(options["arrivals"])
    target = Target(url=options["target"], api_key=options["api_key"])
    folder = options["out"] or Path("out/loadtest") / time.strftime("%Y%m%d-%H%M%S")
    card = find_model(target, options["model"])
    settings = _settings(options, target, card.id)
    planned = build_jobs(settings.workload, card)
    source = PagesSource(options["metrics"]) if options["metrics"] else None
    with ExitStack() as stack:
        run_folder = stack.enter_context(RunFolder(folder))
        saved = options["save_answers"]
        answers = stack.enter_context(closing(AnswerFile(saved))) if saved else None
        view = LiveView(Console(stderr=True))
        load_run = LoadRun(settings, planned, arrivals, run_folder, view, answers, source)
        run_in_loop(load_run.run())
    run = read_run(folder)
    _show(run_report(run), folder)
    _end_in_failure(run)


def _settings(options: Mapping[str, Any], target: Target, model: str) -> LoadSettings:
    from cluster.loadtest.jobs import WorkloadSettings
    from cluster.loadtest.run_file import LoadSettings
    from cluster.loadtest.statistics import parse_slo

    shared = ("arrivals", "repeats", "seed", "longest_s", "timeout_s", "warm_up", "sample_s",
              "settle_s")  # fmt: skip
    own = ("flat", "requests", "tokenizer", "context_tokens", "max_tokens", "temperature",
           "ignore_eos", "questions")  # fmt: skip
    return LoadSettings(
        target=target,
        model=model,
        workload=WorkloadSettings(
            spec=options["workload"],
            extra_body=_json_object(options["extra_body"]),
            **{name: options[name] for name in own},
        ),
        slo=parse_slo(options["slo"]) if options["slo"] else {},
        **{name: options[name] for name in shared},
    )


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise EvaluationError(f"--extra-body {text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise EvaluationError(f"--extra-body {text!r} is no JSON object")
    return value


def _show(report: Report, folder: Path) -> None:
    from apar_core.reporting import write_report

    page = write_report(report, folder)
    console = Console()
    for table in report.tables:
        console.print(rich_table(table))
    if "Attention" in report.facts:
        console.print(f"[bold yellow]Attention:[/bold yellow] {escape(report.facts['Attention'])}")
    console.print(f"Report: [bold]{page}[/bold]", soft_wrap=True)


def _end_in_failure(run: Run) -> None:
    """End with exit code 1 where nothing succeeded."""
    if not run.whole:
        Console(stderr=True).print("[red]Error:[/red] no request succeeded")
        raise typer.Exit(1)
