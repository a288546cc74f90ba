"""`apar experiment`: the paper's high-throughput experiments, and comparisons beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markdown import Markdown

from cluster.cli.calibrate import calibrate, validate
from cluster.cli.options import (
    MODEL_HELP,
    RESUMABLE,
    BlockSize,
    CommaList,
    Concurrency,
    ContextLength,
    Duration,
    Model,
    Seed,
    Trace,
    duration_option,
    list_option,
    out_option,
    wrong_value,
)
from cluster.cli.terminal import StageProgress, clear_errors, show_report, stage_progress
from cluster.experiments.settings import MODES, ExperimentSettings

if TYPE_CHECKING:
    from cluster.experiments.peers.runs import PeerSettings
    from cluster.experiments.scale_out import ReplicasRun, ScaleOutSettings
    from cluster.experiments.simulated_scale_out import SimulatedClusters

experiment = typer.Typer(
    no_args_is_help=True,
    help="Measure forking under load as section 3.4 of the APAR paper does: recorded answers are "
    "replayed token by token, forked and sequentially, by engines in this process. Example: "
    "[bold]apar experiment fig5a --trace ANSWERS.jsonl --quick[/bold]",
    rich_markup_mode="rich",
)

experiment.command()(calibrate)
experiment.command(no_args_is_help=True)(validate)

_CPU_MODEL = "cpu-7b"
_KV_SHARES_HELP = "Shares of the KV cache to run with."
# A figure in less than five minutes on two cores.
_QUICK: dict[str, Any] = {
    "answers": 20,
    "kv_shares": (0.2, 0.9),
    "mixed_kv_shares": (0.5,),
    "concurrencies": (1, 4),
    "sample_s": 0.5,
}
_SIMULATED_REPLICAS = (1, 2, 4, 8, 16, 32)
# Names of options for fields of settings that have other names.
_OPTIONS = {
    "max_requests": "concurrency",
    "concurrencies": "concurrency",
    "modes": "methods",
    "rounds": "repeats",
    "max_tokens": "context-length",
    "sample_s": "sample-every",
}


def _default(field: str) -> str:
    """Return the default of a setting as the option takes it."""
    value = ExperimentSettings.model_fields[field].default
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


ExperimentModel = Annotated[
    str,
    typer.Option(help=f"{MODEL_HELP} Or cpu-7b or cpu-13b: random weights, sized for a CPU."),
]
Answers = Annotated[int, typer.Option(min=1, help="Number of answers, drawn from the trace.")]
KvTokens = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Tokens of the whole KV cache; 0 lets vLLM size it by memory.",
        show_default=_default("kv_tokens"),
    ),
]
Repeats = Annotated[
    int,
    typer.Option(min=1, help="Repeats of each run; a later run with more adds the missing ones."),
]
SideBySide = Annotated[
    bool | None,
    typer.Option(
        "--side-by-side/--one-engine",
        help="Run one engine per method, taking turns of a few steps, so that changes of the "
        "machine's speed affect all alike. Needs the memory of all of them (default: with "
        "cpu-7b and cpu-13b).",
    ),
]
Engine = Annotated[
    str | None, typer.Option(help="Further vLLM engine arguments, as a JSON object.")
]
Steps = Annotated[int, typer.Option(min=1, help="Number of timed steps.")]


def _figure_command(names: tuple[str, ...], text: str) -> Callable[..., None]:
    def command(
        trace: Trace,
        out: Annotated[Path, out_option("experiment", help=RESUMABLE)],
        mixed_trace: Annotated[
            Path | None,
            typer.Option(help="Recorded answers in their natural mix.", dir_okay=False),
        ] = None,
        model: ExperimentModel = _CPU_MODEL,
        quick: Annotated[
            bool, typer.Option("--quick", help="Few answers and points: takes minutes.")
        ] = False,
        answers: Annotated[
            int | None,
            typer.Option(
                min=1,
                help="Number of answers, drawn from each trace.",
                show_default=_default("answers"),
            ),
        ] = None,
        context_length: ContextLength = None,
        kv_tokens: KvTokens = None,
        block_size: BlockSize = None,
        concurrency: Annotated[
            CommaList[int] | None,
            list_option(
                help="Numbers of concurrent requests: the points of figure 5b. Figure 5a and the "
                "tables use the largest (350 in the paper).",
                default=_default("concurrencies"),
                item=int,
                minimum=1,
            ),
        ] = None,
        kv_shares: Annotated[
            CommaList[float] | None,
            list_option(help=_KV_SHARES_HELP, item=float, default=_default("kv_shares")),
        ] = None,
        methods: Annotated[
            CommaList[str] | None,
            list_option(
                help=f"Methods to compare: {', '.join(MODES)}.", choices=MODES, default="all"
            ),
        ] = None,
        repeats: Annotated[
            int | None,
            typer.Option(
                min=1,
                help="Repeats of each run; medians are compared. A later run with more adds the "
                "missing ones.",
                show_default=_default("rounds"),
            ),
        ] = None,
        side_by_side: SideBySide = None,
        sample_every: Annotated[
            float | None,
            duration_option(
                help="Time between samples (default: 1s; 3s in the paper).", minimum="1ms"
            ),
        ] = None,
        token_time_multiple: Annotated[
            float | None,
            typer.Option(
                help="Time per token that the adaptive policy keeps to, in steps of sequential "
                "decoding.",
                show_default=_default("token_time_multiple"),
            ),
        ] = None,
        seed: Seed = 0,
        engine: Engine = None,
    ) -> None:
        values = {
            "trace": trace,
            "mixed_trace": mixed_trace,
            "model": model,
            "answers": answers,
            "max_tokens": context_length,
            "kv_tokens": kv_tokens,
            "block_size": block_size,
            "max_requests": max(concurrency) if concurrency else None,
            "concurrencies": concurrency,
            "kv_shares": kv_shares,
            "modes": methods,
            "rounds": repeats,
            "side_by_side": side_by_side,
            "sample_s": sample_every,
            "token_time_multiple": token_time_multiple,
            "seed": seed,
            "engine": _engine_arguments(engine),
        }
        _run_figures(names, _settings(values, quick=quick), out)

    command.__doc__ = text
    return command


def _run_figures(names: tuple[str, ...], settings: ExperimentSettings, out: Path) -> None:
    from cluster.experiments.run import run_experiments

    with clear_errors(), stage_progress() as progress:
        pages = run_experiments(names, settings, out, progress.start)
    for page in pages:
        Console().print(Markdown(page.read_text(encoding="utf-8")))
        Console().print(f"Files beside [bold]{page}[/bold]", soft_wrap=True)


def _settings(values: Mapping[str, Any], *, quick: bool) -> ExperimentSettings:
    given = {name: value for name, value in values.items() if value is not None}
    if given.get("kv_tokens") == 0:
        given["kv_tokens"] = None
    try:
        return ExperimentSettings.model_validate({**(_QUICK if quick else {}), **given})
    except ValidationError as error:
        raise _bad_option(error) from error


def _bad_option(error: ValidationError) -> typer.BadParameter:
    first = error.errors()[0]
    field = str(first["loc"][0])
    option = _OPTIONS.get(field, field.replace("_", "-"))
    message = first["msg"].removeprefix("Value error, ")
    # Messages of this project's own checks contain the value.
    if first["type"] != "value_error":
        message += f" (got {first['input']!r})"
    return wrong_value(f"--{option}", message)


def _engine_arguments(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise wrong_value("--engine", f"{text!r} is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise wrong_value("--engine", f"{text!r} is not a JSON object")
    # Importing vLLM takes seconds.
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for name in arguments:
        if name not in known:
            raise wrong_value("--engine", f"vLLM has no engine argument {name!r}")
    return arguments


for _name, _names, _what in (
    ("fig5a", ("fig5a",), "Measure throughput at several sizes of the KV cache: figure 5a."),
    ("fig5b", ("fig5b",), "Measure the mean latency at several concurrencies: figure 5b."),
    ("table1", ("table1",), "Count the max cached tokens in the runs of figure 5a: table 1."),
    ("table2", ("table2",), "Count the attended tokens in the runs of figure 5a: table 2."),
    ("all", ("fig5a", "fig5b", "table1", "table2"), "Run figures 5a and 5b and tables 1 and 2."),
):
    _text = f"""{_what}

    The figures and tables share the runs in --out, and an interrupted run continues there. Example:
    [bold]apar experiment {_name} --trace ANSWERS.jsonl --quick[/bold]
    """
    experiment.command(_name, no_args_is_help=True)(_figure_command(_names, _text))


@experiment.command()
def step_curve(
    out: Annotated[Path, out_option("experiment-step-curve", help=RESUMABLE)],
    model: ExperimentModel = _CPU_MODEL,
    rows: Annotated[
        CommaList[int],
        list_option(
            help="Numbers of rows (threads per step), two or more.",
            item=int,
            minimum=1,
            default="1,2,4,...,1024",
        ),
    ] = CommaList(2**power for power in range(11)),
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens that each row attends to.")
    ] = 64,
    steps: Annotated[
        int, typer.Option(min=2, help="Number of timed steps at each number of rows.")
    ] = 20,
    engine: Engine = None,
) -> None:
    """Time decoding steps at several numbers of rows, and find the knee of the curve.

    Example: [bold]apar experiment step-curve --model cpu-7b --rows 1,8,64[/bold]
    """
    from cluster.experiments.step_curve import CurveLoad
    from cluster.experiments.step_curve_report import curve_settings, report_step_curve

    counts = tuple(sorted(set(rows)))
    if len(counts) < 2:
        raise wrong_value("--rows", "give two different numbers or more")
    load = CurveLoad(counts, prompt_tokens, steps)
    settings = curve_settings(model=model, load=load, engine=_engine_arguments(engine))
    with clear_errors(), stage_progress() as progress:
        show_report(report_step_curve(settings, load, out, progress.start), out)


@experiment.command(no_args_is_help=True)
def peers(
    trace: Trace,
    out: Annotated[Path, out_option("experiment-peers", help=RESUMABLE)],
    model: ExperimentModel = _CPU_MODEL,
    answers: Answers = 96,
    repeats: Repeats = 2,
    side_by_side: SideBySide = None,
    kv_shares: Annotated[
        CommaList[float] | None,
        list_option(help=_KV_SHARES_HELP, item=float, default="0.3,0.9"),
    ] = None,
    kv_tokens: KvTokens = None,
    context_length: ContextLength = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of concurrent requests.", show_default=_default("max_requests")
        ),
    ] = None,
    methods: Annotated[
        CommaList[str] | None,
        list_option(
            help="Methods to compare: sequential, client-forking, skeleton, parent-stops, "
            "parent-stops-free, eager, adaptive (default: all)."
        ),
    ] = None,
) -> None:
    """Compare methods of parallel answering on the same engine, answers and KV memory.

    Methods: sequential decoding, forking by the client, skeleton-of-thought, a parent that stops
    for its children, and ours, eager and adaptive. The report has throughput, latency, steps,
    recomputed tokens and peak KV use. Takes about 50 minutes on 2 idle cores; an example of a few
    minutes:

    [bold]apar experiment peers --trace TRACE.jsonl --answers 16 --repeats 1 --kv-shares 0.9[/bold]
    """
    from cluster.experiments.peers.experiment import run_peers

    given = {
        "trace": trace,
        "model": model,
        "answers": answers,
        "rounds": repeats,
        "side_by_side": side_by_side,
        "kv_shares": kv_shares,
        "kv_tokens": kv_tokens,
        "max_tokens": context_length,
        "max_requests": concurrency,
        "methods": methods,
    }
    settings = _peer_settings({name: each for name, each in given.items() if each is not None})
    with clear_errors(), stage_progress() as progress:
        show_report(run_peers(settings, out, progress.start), out)


def _peer_settings(values: dict[str, Any]) -> PeerSettings:
    from cluster.experiments.peers.runs import PeerSettings

    if values.get("kv_tokens") == 0:
        values["kv_tokens"] = None
    try:
        return PeerSettings(**values)
    except ValidationError as error:
        raise _bad_option(error) from error


@experiment.command(no_args_is_help=True)
def fork_cost(
    trace: Trace,
    out: Annotated[Path, out_option("experiment-fork-cost", help=RESUMABLE)],
    model: ExperimentModel = _CPU_MODEL,
    answers: Answers = 32,
    block_size: BlockSize = 32,
) -> None:
    """Count computed tokens and copied blocks per fork, compared with prefix caching.

    Example: [bold]apar experiment fork-cost --trace TRACE.jsonl --answers 16[/bold]
    """
    from cluster.experiments.fork_cost_report import report_fork_cost

    settings = ExperimentSettings(
        model=model,
        trace=trace,
        answers=answers,
        block_size=block_size or 32,
        kv_tokens=None,
        kv_shares=(1.0,),
        mixed_kv_shares=(1.0,),
    )
    with clear_errors(), stage_progress() as progress:
        show_report(report_fork_cost(settings, out, progress.start), out)


@experiment.command(no_args_is_help=True)
def profile(
    trace: Trace,
    out: Annotated[Path, out_option("experiment-profile", help=RESUMABLE)],
    model: ExperimentModel = _CPU_MODEL,
    concurrency: Concurrency = 350,
    steps: Steps = 40,
    warm_steps: Annotated[
        int, typer.Option(min=0, help="Number of untimed steps before them.")
    ] = 60,
    answers: Answers = 350,
) -> None:
    """Time the parts of a step with many requests: sequential, eager and adaptive.

    Parts: schedule, model inputs, model forward, logits, logits processors, sampling, sampled
    tokens to lists, scheduler update, output processing, detokenizing. Example, in 2 minutes:
    [bold]apar experiment profile --trace TRACE.jsonl --concurrency 50[/bold]
    """
    from cluster.experiments.profile_report import profile_settings, report_profile
    from cluster.experiments.step_profile import ProfileLoad

    load = ProfileLoad(num_requests=concurrency, warm_steps=warm_steps, steps=steps)
    settings = profile_settings(trace=trace, model=model, answers=answers, load=load)
    with clear_errors(), stage_progress() as progress:
        show_report(report_profile(settings, load, out, progress.start), out)


@experiment.command()
def scheduler_cost(
    out: Annotated[Path, out_option("experiment-scheduler-cost", help=RESUMABLE)],
    threads: Annotated[int, typer.Option(min=8, help="Number of live threads.")] = 2000,
    threads_per_request: Annotated[int, typer.Option(min=2, help="Threads per request.")] = 8,
    steps: Steps = 200,
    repeats: Repeats = 3,
) -> None:
    """Time the scheduler's work per step, compared with vLLM's for as many plain requests.

    No model runs: tokens are made up. Example, in a minute:
    [bold]apar experiment scheduler-cost --threads 400 --repeats 1[/bold]
    """
    from cluster.experiments.scheduler_report import SchedulerLoadSettings, report_scheduler_cost

    if threads % threads_per_request:
        raise typer.BadParameter(
            f"--threads {threads} is not a multiple of --threads-per-request {threads_per_request}"
        )
    settings = SchedulerLoadSettings(
        num_threads=threads, threads_per_request=threads_per_request, steps=steps, rounds=repeats
    )
    with clear_errors(), stage_progress() as progress:
        show_report(report_scheduler_cost(settings, out, progress.start), out)


@experiment.command(no_args_is_help=True)
def scale_out(
    trace: Trace,
    out: Annotated[Path, out_option("experiment-scale-out", help=RESUMABLE)],
    model: Model = "apar-tiny",
    replicas: Annotated[
        CommaList[int],
        list_option(help="Numbers of replicas to serve with.", item=int, minimum=1, default="1,2"),
    ] = CommaList((1, 2)),
    answers: Annotated[int, typer.Option(min=1, help="Number of answers per repeat.")] = 96,
    concurrency: Concurrency = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of the load.")] = 3,
    simulated: Annotated[
        float, duration_option(help="Duration of simulated arrivals; 0s simulates nothing.")
    ] = Duration.of("60s"),
    simulated_model: Annotated[
        str, typer.Option(help="Step times of the simulation: 7b-roofline or tiny-measured.")
    ] = "7b-roofline",
    simulation_data: Annotated[
        Path, typer.Option(help="Folder with traces/ and arrivals/ for the simulation.")
    ] = Path("../shared/data"),
) -> None:
    """Serve the same load with 1 and 2 replicas, and simulate more than fit on this machine.

    The load is replayed answers through `apar serve`, forked and sequential. Replicas, gateway
    and client share the cores of one machine, so the CPU time per token is reported too. Example:
    [bold]apar experiment scale-out --trace TRACE.jsonl --answers 48 --repeats 1[/bold]
    """
    from cluster.experiments.scale_out import ScaleOutSettings
    from cluster.experiments.scale_out_report import report_scale_out
    from cluster.experiments.simulated_scale_out import can_simulate, check_model, find_repository

    if not trace.is_file():
        raise wrong_value("--trace", f"no file {trace}")
    find_repository()
    simulates = simulated > 0 and can_simulate(simulation_data)
    settings = ScaleOutSettings(
        trace=trace,
        model=model,
        replicas=tuple(replicas),
        requests=answers,
        concurrency=concurrency,
        repeats=repeats,
    )
    with clear_errors():
        if simulates:
            check_model(simulated_model)
        with stage_progress() as progress:
            runs = _measure(settings, out, progress)
            clusters = None
            if simulates:
                clusters = _simulate(simulation_data, simulated_model, simulated, progress)
        show_report(report_scale_out(settings, runs, clusters, wanted=simulated > 0), out)


def _measure(settings: ScaleOutSettings, out: Path, progress: StageProgress) -> list[ReplicasRun]:
    from cluster.experiments.parts import PartStore
    from cluster.experiments.scale_out import run_replicas

    store = PartStore(out, settings.as_text())
    done = progress.start("numbers of replicas", len(settings.replicas))
    runs: list[ReplicasRun] = []
    for number in settings.replicas:
        runs += run_replicas(settings, number, out, store)
        done()
    return runs


def _simulate(
    data: Path, model: str, duration_s: float, progress: StageProgress
) -> SimulatedClusters:
    from cluster.experiments.simulated_scale_out import ROUTERS, simulate

    done = progress.start("simulated clusters", len(ROUTERS) * len(_SIMULATED_REPLICAS))
    return simulate(data, model, _SIMULATED_REPLICAS, duration_s=duration_s, done=done)
