"""`apar experiment`: the paper's high-throughput experiments, in engines in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markdown import Markdown

from cluster.cli.evaluation_progress import clear_errors, stage_progress
from cluster.cli.experiment_costs import fork_cost, profile, scheduler_cost
from cluster.cli.experiment_peers import SideBySide, peers, show_report
from cluster.cli.experiment_scale_out import scale_out
from cluster.experiments.settings import ExperimentSettings

experiment = typer.Typer(
    no_args_is_help=True,
    help="Measure forking under load as section 3.4 of the APAR paper does: recorded answers are "
    "replayed token by token, forked and not, in engines of this process. Example: "
    "[bold]apar experiment fig5a --trace ANSWERS.jsonl --quick --out out/quick[/bold]",
    rich_markup_mode="rich",
)

# A figure in less than five minutes on two cores: for a look after a change.
_QUICK: dict[str, Any] = {
    "answers": 20,
    "kv_shares": (0.2, 0.9),
    "mixed_kv_shares": (0.5,),
    "concurrencies": (1, 4),
    "sample_s": 0.5,
}

Out = Annotated[
    Path, typer.Option(help="Folder of runs and results; run again to go on.", file_okay=False)
]
Trace = Annotated[
    Path,
    typer.Option(
        help="Recorded answers that fork, as JSON lines with prompt and response.", dir_okay=False
    ),
]
MixedTrace = Annotated[
    Path | None,
    typer.Option("--mixed", help="Recorded answers in their natural mix.", dir_okay=False),
]
Model = Annotated[
    str,
    typer.Option(
        help="cpu-7b or cpu-13b (random weights, sized for a CPU), a preset, a checkpoint folder "
        "or a hub name; a checkpoint has to have control tokens."
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Few answers and points: minutes.")]
Answers = Annotated[int | None, typer.Option(min=1, help="Answers of each trace.")]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Longest answer with its prompt; others are left out.")
]
KvTokens = Annotated[
    int | None,
    typer.Option(help="Tokens of the whole KV cache; 0 lets vLLM size it by its memory."),
]
BlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens of a KV block.")]
Cap = Annotated[
    int | None, typer.Option(min=1, help="Requests that run at once at most; 350 in the paper.")
]
KvShares = Annotated[
    str | None, typer.Option(help="Shares of the KV cache, for example 0.1,0.5,0.9.")
]
Concurrencies = Annotated[
    str | None, typer.Option(help="Requests under way in figure 5b, for example 1,8,64.")
]
Modes = Annotated[str | None, typer.Option(help="Of sequential,eager,adaptive.")]
SampleS = Annotated[float | None, typer.Option(help="Seconds between samples; 3 in the paper.")]
Rounds = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Runs of each mode at each point, whose medians are compared; a folder may get more.",
    ),
]
TokenTime = Annotated[
    float | None,
    typer.Option(
        "--token-time-multiple",
        help="What the adaptive policy keeps to a token, in steps of sequential decoding.",
    ),
]
Seed = Annotated[int, typer.Option(help="Of the drawing of the answers.")]
Engine = Annotated[
    str | None, typer.Option("--engine", help="Further arguments of vLLM's engine, as JSON.")
]


def _figure_command(names: tuple[str, ...], text: str) -> Callable[..., None]:
    def command(
        trace: Trace,
        out: Out,
        mixed: MixedTrace = None,
        model: Model = "cpu-7b",
        quick: Quick = False,
        answers: Answers = None,
        max_tokens: MaxTokens = None,
        kv_tokens: KvTokens = None,
        block_size: BlockSize = None,
        cap: Cap = None,
        kv_shares: KvShares = None,
        concurrencies: Concurrencies = None,
        modes: Modes = None,
        rounds: Rounds = None,
        side_by_side: SideBySide = None,
        sample_s: SampleS = None,
        token_time_multiple: TokenTime = None,
        seed: Seed = 0,
        engine: Engine = None,
    ) -> None:
        values = {
            "trace": trace,
            "mixed_trace": mixed,
            "model": model,
            "answers": answers,
            "max_tokens": max_tokens,
            "kv_tokens": kv_tokens,
            "block_size": block_size,
            "max_requests": cap,
            "kv_shares": _listed(kv_shares),
            "concurrencies": _listed(concurrencies),
            "modes": _listed(modes),
            "rounds": rounds,
            "side_by_side": side_by_side,
            "sample_s": sample_s,
            "token_time_multiple": token_time_multiple,
            "seed": seed,
            "engine": _engine_arguments(engine),
        }
        _run(names, _settings(values, quick=quick), out)

    command.__doc__ = text
    return command


def _run(names: tuple[str, ...], settings: ExperimentSettings, out: Path) -> None:
    from cluster.experiments.run import run_experiments

    console = Console(stderr=True)
    with clear_errors(console), stage_progress(console) as progress:
        pages = run_experiments(names, settings, out, progress.start)
    for page in pages:
        Console().print(Markdown(page.read_text(encoding="utf-8")))
        Console().print(f"Files beside [bold]{page}[/bold]", soft_wrap=True)


def _settings(values: dict[str, Any], *, quick: bool) -> ExperimentSettings:
    given = {name: value for name, value in values.items() if value is not None}
    if given.get("kv_tokens") == 0:
        given["kv_tokens"] = None
    try:
        return ExperimentSettings.model_validate({**(_QUICK if quick else {}), **given})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-")
        raise typer.BadParameter(f"--{name}: {first['msg']} (got {first['input']!r})") from error


def _listed(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(","))


def _engine_arguments(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--engine: {text!r} is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise typer.BadParameter(f"--engine: {text!r} is no JSON object")
    return arguments


def step_curve(
    out: Annotated[
        Path, typer.Option(help="Folder of data and report; run again to go on.", file_okay=False)
    ],
    model: Model = "cpu-7b",
    rows: Annotated[
        str, typer.Option(help="Numbers of rows, two or more, for example 1,8,64.")
    ] = "1,2,4,8,16,32,64,128,256,512,1024",
    context: Annotated[
        int, typer.Option(min=1, help="Prompt tokens that each row attends to.")
    ] = 64,
    steps: Annotated[int, typer.Option(min=2, help="Steps that are timed at each number.")] = 20,
    engine: Engine = None,
) -> None:
    """Time decoding steps against their number of rows, and say where the knee is.

    Example: [bold]apar experiment step-curve --model cpu-7b --out out/curve[/bold]
    """
    from cluster.experiments.step_curve import CurveLoad
    from cluster.experiments.step_curve_report import curve_settings, report_step_curve

    load = CurveLoad(_row_counts(rows), context, steps)
    settings = curve_settings(model=model, load=load, engine=_engine_arguments(engine))
    with clear_errors(Console(stderr=True)), stage_progress(Console(stderr=True)) as progress:
        show_report(report_step_curve(settings, load, out, progress.start), out)


def _row_counts(text: str) -> tuple[int, ...]:
    counts = tuple(sorted({_positive(part.strip()) for part in text.split(",")}))
    if len(counts) < 2:
        raise typer.BadParameter(f"--rows: {text!r} has one number: a line takes two")
    return counts


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise typer.BadParameter(f"--rows: {text!r} is no number of rows")
    return int(text)


for _name, _names, _text in (
    ("fig5a", ("fig5a",), "Throughput against KV memory: figure 5a of the paper."),
    ("fig5b", ("fig5b",), "Mean latency against concurrency: figure 5b of the paper."),
    ("table1", ("table1",), "Max cached tokens, from the runs of figure 5a: table 1."),
    ("table2", ("table2",), "Attended tokens, from the runs of figure 5a: table 2."),
    ("all", ("fig5a", "fig5b", "table1", "table2"), "Both figures and both tables."),
):
    experiment.command(_name, no_args_is_help=True)(_figure_command(_names, _text))
experiment.command("step-curve", no_args_is_help=True)(step_curve)
for _function in (peers, fork_cost, profile, scale_out):
    experiment.command(_function.__name__.replace("_", "-"), no_args_is_help=True)(_function)
experiment.command("scheduler-cost")(scheduler_cost)
