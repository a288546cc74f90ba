"""`apar loadtest`: measures an OpenAI-compatible server under load, and compares runs."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from apar_core.errors import EvaluationError
from cluster.cli.options import (
    BenchmarkFiles,
    ContextLength,
    Duration,
    MaxTokens,
    Metrics,
    ModelName,
    Seed,
    TargetKeyEnv,
    dated_folder,
    duration_option,
    finite,
    out_option,
    wrong_value,
)
from cluster.cli.terminal import clear_errors, fail, print_table

if TYPE_CHECKING:
    from apar_core.reporting import Report
    from cluster.loadtest.arrivals import Arrivals

loadtest = typer.Typer(
    no_args_is_help=True,
    help="Put load on an OpenAI-compatible server, and compare runs.",
    rich_markup_mode="rich",
)


@loadtest.command(no_args_is_help=True)
def run(
    target: Annotated[
        str,
        typer.Option(help="URL of the server, with or without /v1."),
    ],
    model_name: ModelName = None,
    target_key_env: TargetKeyEnv = "APAR_API_KEY",
    timeout: Annotated[
        float,
        duration_option(help="Timeout of a request.", minimum="100ms"),
    ] = Duration.of("10m"),
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Prompts to send: vicuna-bench, mt-bench, held-out (apar-tiny's), a file of JSON "
            "lines with a `prompt` each, or a .txt file with a prompt per line."
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Instead of prompts: recorded answers that the server generates again, token by "
            "token. Its model needs `replay: true`.",
            dir_okay=False,
        ),
    ] = None,
    no_fork: Annotated[
        bool,
        typer.Option("--no-fork", help="With --replay: generate the same tokens without forks."),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="With --replay: checkpoint with the model's tokenizer (default: as the server "
            "says)."
        ),
    ] = None,
    context_length: ContextLength = None,
    benchmark_files: BenchmarkFiles = None,
    max_tokens: MaxTokens = 512,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="With --prompts: sampling temperature.", callback=finite),
    ] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="With --prompts: generate exactly --max-tokens per answer."
        ),
    ] = False,
    extra_body: Annotated[
        str | None,
        typer.Option(help="JSON object to merge into the body of every request.", metavar="JSON"),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Number of concurrent requests."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second, at random times (Poisson); `inf` sends all at once. With "
            "--arrivals: the mean rate to scale the recorded times to."
        ),
    ] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            help="File with recorded times of requests: seconds or a column TIMESTAMP.",
            dir_okay=False,
        ),
    ] = None,
    cv: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            callback=finite,
            help="With --rate: coefficient of variation of the gaps between requests; more than 1 "
            "(Poisson) gives bursts.",
        ),
    ] = None,
    answers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of answers per repeat (default: the whole workload once)."
        ),
    ] = None,
    duration: Annotated[
        float | None,
        duration_option(help="Stop sending requests after this time.", minimum="100ms"),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(min=1, help="Number of repeats; three or more give confidence intervals."),
    ] = 1,
    warm_up: Annotated[
        int,
        typer.Option(min=0, help="Number of unmeasured requests sent first, all at once."),
    ] = 1,
    seed: Seed = 0,
    slo: Annotated[
        str | None,
        typer.Option(
            help="Service-level objectives for goodput, such as ttft=2s,tpot=50ms,e2e=30s; also "
            "`path`, `paragraph` and `silence`."
        ),
    ] = None,
    metrics: Metrics = None,
    sample_every: Annotated[
        float,
        duration_option(help="Length of a sample of the throughput.", minimum="100ms"),
    ] = Duration.of("3s"),
    settle_time: Annotated[
        float,
        duration_option(
            help="With --metrics: the counters of a repeat are final when they have not changed "
            "for this time; longer than an engine step.",
        ),
    ] = Duration.of("3s"),
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output folder of a new run.",
            show_default="out/loadtest-DATE, then -2, -3, ...",
            file_okay=False,
        ),
    ] = None,
    save_answers: Annotated[
        Path | None,
        typer.Option(
            help="File to record the answers in, as a trace for --replay.", dir_okay=False
        ),
    ] = None,
) -> None:
    """Put load on a server and measure what its clients see.

    Give a workload, --prompts or --replay, and a load: --concurrency, --rate or --arrivals. Ctrl-C
    ends a run early and reports it. Exits with 1 if no request succeeded. Examples:

    [bold]apar loadtest run --target http://127.0.0.1:8000 --prompts held-out --concurrency
    16[/bold]

    [bold]apar loadtest run --target http://127.0.0.1:8000 --replay trace.jsonl --rate 4 --repeats 3
    --metrics 127.0.0.1:9464 --slo ttft=2s,e2e=30s --out out/forked[/bold]
    """
    # Importing these takes a second, and `apar --help` must be fast.
    from cluster.loadtest.jobs import (
        Target,
        WorkloadSettings,
        build_jobs,
        find_model,
        server_version,
    )
    from cluster.loadtest.live_view import LiveView
    from cluster.loadtest.load_run import LoadRun, run_in_loop
    from cluster.loadtest.report import run_report
    from cluster.loadtest.run_file import AnswerFile, LoadSettings, RunFolder, read_run
    from cluster.loadtest.statistics import parse_slo
    from cluster.monitor.sources import PagesSource

    with clear_errors():
        times, times_text = _arrivals(concurrency, rate, arrivals, cv)
        workload = WorkloadSettings(
            spec=_workload(prompts, replay),
            flat=no_fork,
            requests=answers,
            tokenizer=tokenizer,
            context_tokens=context_length,
            max_tokens=max_tokens,
            temperature=temperature,
            ignore_eos=ignore_eos,
            questions=benchmark_files,
            extra_body=_json_object(extra_body),
        )
        objectives = parse_slo(slo) if slo else {}
        server = Target(url=target, api_key=os.environ.get(target_key_env))
        card = find_model(server, model_name)
        settings = LoadSettings(
            target=server,
            model=card.id,
            workload=workload,
            arrivals=times_text,
            repeats=repeats,
            seed=seed,
            longest_s=duration,
            timeout_s=timeout,
            warm_up=warm_up,
            sample_s=sample_every,
            settle_s=settle_time,
            slo=dict(objectives),
        )
        planned = build_jobs(workload, card)
        folder = out or _unused_folder()
        source = PagesSource(metrics) if metrics else None
        with ExitStack() as stack:
            run_folder = stack.enter_context(RunFolder(folder))
            saved = stack.enter_context(closing(AnswerFile(save_answers))) if save_answers else None
            view = LiveView(Console(stderr=True))
            load_run = LoadRun(
                settings, planned, times, run_folder, view, saved, source, server_version(server)
            )
            run_in_loop(load_run.run())
        finished = read_run(folder)
        _show(run_report(finished), folder)
    if not finished.whole:
        fail("no request succeeded")


def _workload(prompts: str | None, replay: Path | None) -> str:
    if (prompts is None) == (replay is None):
        raise typer.BadParameter("give either --prompts or --replay")
    return f"prompts:{prompts}" if replay is None else f"replay:{replay}"


def _arrivals(
    concurrency: int | None, rate: float | None, file: Path | None, cv: float | None
) -> tuple[Arrivals, str]:
    """Return when requests are sent, and the same in words for reports."""
    from cluster.loadtest.arrivals import AllAtOnce, ClosedLoop, GammaArrivals, read_arrivals

    given = [concurrency is not None, rate is not None or file is not None]
    if sum(given) != 1:
        raise typer.BadParameter("give one of --concurrency, --rate and --arrivals")
    if cv is not None and (rate is None or file is not None):
        raise typer.BadParameter("--cv is only for --rate")
    if rate is not None and not rate > 0:
        raise wrong_value("--rate", f"{rate:g} is not above 0")
    if rate == float("inf") and (cv is not None or file is not None):
        raise wrong_value("--rate", "inf cannot be combined with --cv or --arrivals")
    if concurrency is not None:
        return ClosedLoop(concurrency), f"{concurrency} concurrent requests"
    if file is not None:
        at_rate = "" if rate is None else f", scaled to {rate:g} per second"
        return read_arrivals(file, rate), f"at the times in {file}{at_rate}"
    assert rate is not None
    if rate == float("inf"):
        return AllAtOnce(), "all at once"
    bursts = "" if cv is None else f", coefficient of variation {cv:g}"
    return GammaArrivals(rate, cv or 1.0), f"{rate:g} per second{bursts}"


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise EvaluationError(f"--extra-body {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise EvaluationError(f"--extra-body {text!r} is not a JSON object")
    return value


def _unused_folder() -> Path:
    """Return today's default folder, numbered if there is one already."""
    first = dated_folder("loadtest")
    folder, number = first, 1
    while folder.exists():
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    return folder


@loadtest.command(no_args_is_help=True)
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs; the first one is the baseline.")
    ],
    out: Annotated[Path, out_option("loadtest-compare", help="Output folder of the report.")],
) -> None:
    """Show runs side by side, with the ratios to the first one and their confidence intervals.

    Example: [bold]apar loadtest compare out/flat out/forked --out out/compared[/bold]
    """
    from cluster.loadtest.report import compared
    from cluster.loadtest.run_file import read_run

    with clear_errors():
        _show(compared([read_run(path) for path in runs]), out)


def _show(report: Report, folder: Path) -> None:
    from apar_core.reporting import write_report

    page = write_report(report, folder)
    console = Console()
    for table in report.tables:
        print_table(table)
    if "Attention" in report.facts:
        console.print(f"[bold yellow]Attention:[/bold yellow] {escape(report.facts['Attention'])}")
    console.print(f"Report: [bold]{page}[/bold]", soft_wrap=True)
