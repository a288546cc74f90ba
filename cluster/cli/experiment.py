"""`apar experiment`: the paper's high-throughput experiments, and comparisons beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from cluster.cli.calibrate import EngineArgs, calibrate, engine_arguments, validate
from cluster.cli.options import (
    RESUMABLE,
    BlockSize,
    CommaList,
    Concurrency,
    ContextLength,
    Model,
    Seed,
    Trace,
    duration_option,
    list_option,
    out_option,
    wrong_value,
)
from cluster.cli.terminal import StageProgress, clear_errors, show_report, stage_progress
from cluster.lab.experiments.methods import METHODS
from cluster.lab.experiments.settings import ExperimentSettings

if TYPE_CHECKING:
    from cluster.lab.experiments.scale_out import ReplicasRun, ScaleOutSettings

experiment = typer.Typer(
    no_args_is_help=True,
    help="Measure forking under load as section 3.4 of the APAR paper does: recorded answers are "
    "replayed token by token, forked and sequentially, by vLLM's scheduler in virtual time, which "
    "predicts a GPU's, or by a real engine. Example: "
    "[bold]apar experiment fig5a --trace ANSWERS.jsonl --quick[/bold]",
    rich_markup_mode="rich",
)

experiment.command()(calibrate)
experiment.command(no_args_is_help=True)(validate)

# Two minutes on two cores.
_QUICK: dict[str, Any] = {
    "answers": 200,
    "kv_shares": (0.1, 0.5, 0.9),
    "concurrencies": (1, 8, 64),
    "peer_shares": (0.5,),
}
# Names of options for fields of settings that have other names.
_OPTIONS = {
    "models": "model",
    "gpus": "gpu",
    "concurrencies": "concurrency",
    "peer_shares": "kv-shares",
    "peer_methods": "methods",
    "rounds": "repeats",
    "max_tokens": "context-length",
    "sample_s": "sample-every",
    "growth_reserve_tokens": "growth-reserve",
}


def _default(field: str) -> str:
    """Return the default of a setting as the option takes it."""
    value = ExperimentSettings.model_fields[field].default
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


Answers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of requests: a trace with fewer answers is repeated, one with more sampled.",
        show_default=_default("answers"),
    ),
]
EngineKind = Annotated[
    str,
    typer.Option(
        "--engine",
        help="virtual: predict the times on --gpu; real: run --model on this machine.",
        metavar="virtual|real",
    ),
]
Models = Annotated[
    CommaList[str] | None,
    list_option(
        help="Models: llama-7b, llama-13b, llama-3-8b, llama-3-70b, a preset, a checkpoint folder "
        "or a config.json.",
        default=_default("models"),
    ),
]
Gpus = Annotated[
    CommaList[str] | None,
    list_option(
        help="GPUs to predict for, such as a100-80gb, h100, h200, l40s, l4.",
        default=_default("gpus"),
    ),
]
TensorParallel = Annotated[
    int | None, typer.Option(min=1, help="GPUs per engine.", show_default="1")
]
Costs = Annotated[
    Path | None,
    typer.Option(
        help="Step costs from `apar experiment calibrate`, in place of predicted ones.",
        dir_okay=False,
        exists=True,
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens of the whole KV cache.", show_default="what fits into the memory"
    ),
]
KvShares = Annotated[
    CommaList[float] | None,
    list_option(
        help="Shares of the KV cache to run with.",
        item=float,
        default=f"{_default('kv_shares')}; peers {_default('peer_shares')}",
    ),
]
Methods = Annotated[
    CommaList[str] | None,
    list_option(
        help=f"Methods to compare: {', '.join(METHODS)}.",
        choices=tuple(METHODS),
        default=f"{_default('methods')}; peers all but lists",
    ),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Processes for virtual runs.", show_default="all cores")
]
Repeats = Annotated[
    int,
    typer.Option(min=1, help="Repeats of each run; a later run with more adds the missing ones."),
]


def _figure_command(name: str, text: str) -> Callable[..., None]:
    def command(
        trace: Trace,
        out: Annotated[Path, out_option("experiment", help=RESUMABLE)],
        mixed_trace: Annotated[
            Path | None,
            typer.Option(help="Recorded answers in their natural mix.", dir_okay=False),
        ] = None,
        engine: EngineKind = "virtual",
        model: Models = None,
        gpu: Gpus = None,
        tensor_parallel: TensorParallel = None,
        costs: Costs = None,
        quick: Annotated[
            bool, typer.Option("--quick", help="Few answers and points: takes two minutes.")
        ] = False,
        answers: Answers = None,
        max_requests: Annotated[
            int | None,
            typer.Option(
                min=1,
                help="Limit on concurrent requests.",
                show_default="350, and 180 for models of more than 10 billion parameters",
            ),
        ] = None,
        kv_shares: KvShares = None,
        concurrency: Annotated[
            CommaList[int] | None,
            list_option(
                help="Numbers of concurrent requests in figure 5b, up to --max-requests.",
                default=_default("concurrencies"),
                item=int,
                minimum=1,
            ),
        ] = None,
        methods: Methods = None,
        context_length: ContextLength = None,
        kv_tokens: KvTokens = None,
        block_size: BlockSize = None,
        sample_every: Annotated[
            float | None, duration_option(help="Time between samples (default: 3s).", minimum="1ms")
        ] = None,
        token_time_multiple: Annotated[
            float | None,
            typer.Option(
                help="Time per token that the adaptive policy keeps to, in mean steps of "
                "sequential decoding.",
                show_default=_default("token_time_multiple"),
            ),
        ] = None,
        growth_reserve: Annotated[
            int | None,
            typer.Option(
                min=0,
                help="KV cache that our methods keep free for each running thread (tokens).",
                show_default=_default("growth_reserve_tokens"),
            ),
        ] = None,
        async_scheduling: Annotated[
            bool, typer.Option(help="Schedule ahead in virtual time, as vLLM does on GPUs.")
        ] = True,
        repeats: Annotated[
            int | None,
            typer.Option(
                min=1,
                help="Repeats of each run of a real engine; medians are compared.",
                show_default=_default("rounds"),
            ),
        ] = None,
        engine_args: EngineArgs = None,
        seed: Seed = 0,
        workers: Workers = None,
    ) -> None:
        values = {
            "engine": engine,
            "trace": trace,
            "mixed_trace": mixed_trace,
            "models": model,
            "gpus": gpu,
            "tensor_parallel": tensor_parallel,
            "costs": costs,
            "answers": answers,
            "max_tokens": context_length,
            "kv_tokens": kv_tokens,
            "block_size": block_size,
            "max_requests": max_requests,
            "concurrencies": concurrency,
            "kv_shares": kv_shares,
            "peer_shares": kv_shares,
            "methods": methods,
            "peer_methods": methods,
            "rounds": repeats,
            "sample_s": sample_every,
            "token_time_multiple": token_time_multiple,
            "growth_reserve_tokens": growth_reserve,
            "is_async": async_scheduling,
            "seed": seed,
            "engine_args": engine_arguments(engine_args),
        }
        settings = _settings(values, quick=quick)
        from cluster.lab.experiments.report import run_experiment

        with clear_errors():
            with stage_progress() as progress:
                report = run_experiment(
                    name, settings, out, progress.start, workers=workers or os.cpu_count() or 1
                )
            # The ratios of all experiments are too many for a terminal.
            hidden = ("runs", "ratios") if name == "all" else ("runs",)
            show_report(report, out / name, hidden=hidden)

    command.__doc__ = text
    return command


def _settings(values: Mapping[str, Any], *, quick: bool = False) -> ExperimentSettings:
    given = {name: value for name, value in values.items() if value is not None}
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


for _name, _what in (
    ("fig5a", "Predict or measure throughput at several sizes of the KV cache: figure 5a."),
    ("fig5b", "Predict or measure the mean latency at several concurrencies: figure 5b."),
    ("table1", "Count the max cached tokens in the runs of figure 5a: table 1."),
    ("table2", "Count the attended tokens in the runs of figure 5a: table 2."),
    (
        "peers",
        "Compare methods of parallel answering: sequential decoding, ours (eager and adaptive), "
        "forking by the client, skeleton-of-thought, and a parent that stops for its children.",
    ),
    ("all", "Run figures 5a and 5b, tables 1 and 2 and the peers, for all --model and --gpu."),
):
    _text = f"""{_what}

    By default a GPU's times are predicted in virtual time. All experiments share the runs in
    --out, and an interrupted run continues there. Example:
    [bold]apar experiment {_name} --trace ANSWERS.jsonl --quick[/bold]
    """
    experiment.command(_name, no_args_is_help=True)(_figure_command(_name, _text))


@experiment.command(no_args_is_help=True)
def fork_cost(
    trace: Trace,
    out: Annotated[Path, out_option("experiment-fork-cost", help=RESUMABLE)],
    engine: EngineKind = "virtual",
    model: Models = None,
    answers: Annotated[int, typer.Option(min=1, help="Number of answers.")] = 200,
    block_size: BlockSize = None,
    engine_args: EngineArgs = None,
) -> None:
    """Count computed tokens and copied blocks per fork, compared with prefix caching.

    Example: [bold]apar experiment fork-cost --trace TRACE.jsonl --answers 16[/bold]
    """
    from cluster.lab.experiments.fork_cost import report_fork_cost

    settings = _settings(
        {
            "engine": engine,
            "models": model,
            "trace": trace,
            "answers": answers,
            "block_size": block_size,
            "engine_args": engine_arguments(engine_args),
        }
    )
    with clear_errors(), stage_progress() as progress:
        show_report(report_fork_cost(settings, out, progress.start), out)


@experiment.command(no_args_is_help=True)
def family_attention(
    trace: Trace,
    out: Annotated[Path, out_option("experiment-family-attention", help=RESUMABLE)],
    mixed_trace: Annotated[
        Path | None,
        typer.Option(help="Recorded answers in their natural mix.", dir_okay=False),
    ] = None,
    model: Annotated[
        CommaList[str] | None,
        list_option(
            help="Models, those on several GPUs as NAME:GPUS.",
            default="llama-7b,llama-13b,llama-3-8b,llama-3-70b:4",
        ),
    ] = None,
    gpu: Annotated[
        CommaList[str] | None,
        list_option(help="GPUs to predict for.", default="a100-80gb,h100,h200"),
    ] = None,
    answers: Answers = None,
    max_requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="Limit on concurrent requests.", show_default="350, and 180 for llama-13b"
        ),
    ] = None,
    kv_shares: Annotated[
        CommaList[float] | None,
        list_option(
            help="Shares of the KV cache to run with.", item=float, default="0.1,0.3,0.5,0.9"
        ),
    ] = None,
    concurrency: Annotated[
        CommaList[int] | None,
        list_option(
            help="Numbers of concurrent requests in closed loops.",
            default="1,8,32,128,350",
            item=int,
            minimum=1,
        ),
    ] = None,
    system_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Length of a system prompt that requests share (tokens).",
            show_default="512",
        ),
    ] = None,
    seed: Seed = 0,
    workers: Workers = None,
) -> None:
    """Predict family attention: threads of a request read the KV blocks that they share once.

    Compares it with forked and sequential decoding as they are. Example:
    [bold]apar experiment family-attention --trace ANSWERS.jsonl --model llama-7b[/bold]
    """
    from cluster.lab.experiments.family_attention import (
        FamilyAttentionSettings,
        report_family_attention,
    )

    values = {
        "trace": trace,
        "mixed_trace": mixed_trace,
        "models": model,
        "gpus": gpu,
        "answers": answers,
        "max_requests": max_requests,
        "kv_shares": kv_shares,
        "concurrencies": concurrency,
        "system_tokens": system_tokens,
        "seed": seed,
    }
    given = {name: value for name, value in values.items() if value is not None}
    try:
        settings = FamilyAttentionSettings.model_validate(given)
    except ValidationError as error:
        raise _bad_option(error) from error
    with clear_errors(), stage_progress() as progress:
        report = report_family_attention(
            settings, out, progress.start, workers=workers or os.cpu_count() or 1
        )
        show_report(report, out, hidden=("costs", "thresholds"))


@experiment.command()
def joins(
    out: Annotated[Path, out_option("experiment-joins", help=RESUMABLE)],
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Recorded answers, one JSON object per line, with prompt and response (default: "
            "those of the embedded model's corpus).",
            dir_okay=False,
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Model to predict for.")] = "llama-7b",
    gpu: Annotated[str, typer.Option(help="GPU to predict for.")] = "a100-80gb",
    concurrency: Annotated[
        CommaList[int],
        list_option(
            help="Numbers of concurrent requests.", item=int, minimum=1, default="1,8,32,128"
        ),
    ] = CommaList((1, 8, 32, 128)),
    round_trips: Annotated[
        CommaList[float],
        list_option(
            help="Times between the end of a client's request and the start of its next (ms).",
            item=float,
            default="0,10",
        ),
    ] = CommaList((0.0, 10.0)),
    answers: Annotated[int, typer.Option(min=1, help="Maximum number of answers.")] = 512,
    kv_share: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the KV cache to run with.")
    ] = 0.9,
    seed: Seed = 0,
) -> None:
    """Compare ways to write answers whose threads join: by the engine, by a client, in sequence.

    Predicts a GPU's times. Recorded answers become outlines, threads and a conclusion. Example:
    [bold]apar experiment joins --trace TRACE.jsonl --concurrency 1,8[/bold]
    """
    from cluster.lab.experiments.joins import JoinSettings, report_joins

    settings = JoinSettings(
        trace=trace,
        model=model,
        gpu=gpu,
        concurrencies=tuple(concurrency),
        round_trips_s=tuple(milliseconds / 1000 for milliseconds in round_trips),
        answers=answers,
        kv_share=kv_share,
        seed=seed,
    )
    with clear_errors(), stage_progress() as progress:
        show_report(report_joins(settings, out, progress.start), out)


@experiment.command(no_args_is_help=True)
def goodput(
    trace: Annotated[
        list[Path],
        typer.Option(
            help="Recorded answers: JSON lines with `prompt` and `response`. Repeatable.",
            dir_okay=False,
            exists=True,
        ),
    ],
    out: Annotated[Path, out_option("experiment-goodput", help=RESUMABLE)],
    model: Annotated[str, typer.Option(help="Model of the replicas.")] = "llama-7b",
    gpu: Annotated[str, typer.Option(help="GPU of the replicas.")] = "a100-80gb",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs per replica.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas.")] = 1,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Limit on the running requests of a replica.")
    ] = 350,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            help="Recorded arrivals: a table with TIMESTAMP and ContextTokens, compressed to each "
            "rate (default: a Poisson process).",
            dir_okay=False,
            exists=True,
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Limits that a request must keep, such as ttft=1s,tpot=1.5x; x is the step time "
            "of a request that runs alone. Times: ttft, certain, tpot, path, tbt, silence, e2e. "
            "Repeatable (default: tpot of 0.75x, 1.5x and 3x, and 3x with silence of 5x and 10x, "
            "each with ttft=1s).",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        CommaList[str],
        list_option(
            help="Methods to compare: off (no forks), paced (no forks, but the adaptive policy), "
            "eager, adaptive.",
            choices=("off", "paced", "eager", "adaptive"),
        ),
    ] = CommaList(("off", "paced", "eager", "adaptive")),
    share: Annotated[
        float,
        typer.Option(min=0.01, max=1, help="Share of the requests that must meet the SLO."),
    ] = 0.95,
    requests: Annotated[
        int,
        typer.Option(
            min=50, help="Number of requests of a run, per replica; a run lasts at least 60 s."
        ),
    ] = 1000,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the draw of requests and arrivals.")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that search in parallel.")] = 1,
) -> None:
    """Find the goodput of fork policies: the highest rate at which requests meet an SLO.

    Predicts a GPU's times. Example:
    [bold]apar experiment goodput --trace TRACE.jsonl --slo ttft=1s,tpot=40ms --jobs 2[/bold]
    """
    from cluster.cli.simulate import replica_settings

    with clear_errors(), stage_progress() as progress:
        # These import vLLM, which takes seconds.
        from cluster.lab.simulation.goodput import SLOS, GoodputSettings, report_goodput
        from cluster.lab.simulation.runs import SimulationSettings

        settings = GoodputSettings(
            SimulationSettings(
                **replica_settings(model, gpu, tensor_parallel),
                traces=tuple(trace),
                arrivals=arrivals,
                replicas=(replicas,),
                concurrency=concurrency,
            ),
            slos=tuple(slo or SLOS),
            methods=tuple(methods),
            share=share,
            requests=requests,
            seed=seed,
        )
        report = report_goodput(settings, out, jobs, progress.start)
    show_report(report, out)


@experiment.command(no_args_is_help=True)
def scheduler_cost(
    trace: Trace,
    out: Annotated[Path, out_option("experiment-scheduler-cost", help=RESUMABLE)],
    model: Annotated[str, typer.Option(help="Model whose KV cache the engines have.")] = "llama-7b",
    gpu: Annotated[str, typer.Option(help="GPU whose memory they have.")] = "a100-80gb",
    answers: Annotated[
        int, typer.Option(min=1, help="Number of answers; a shorter trace is repeated.")
    ] = 948,
    concurrency: Concurrency = 350,
    kv_share: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the KV cache to run with.")
    ] = 0.9,
    streams: Annotated[
        bool,
        typer.Option(
            "--streams",
            help="Stream text and count statistics as a server does, instead of returning token "
            "ids at the end.",
        ),
    ] = False,
    repeats: Repeats = 3,
) -> None:
    """Time the engine's own Python per row: vLLM's scheduler, and ours with and without forks.

    Engines run in virtual time, so nothing but the scheduler and the output processor takes time.
    Example: [bold]apar experiment scheduler-cost --trace TRACE.jsonl --repeats 1[/bold]
    """
    from cluster.lab.experiments.scheduler_cost import SchedulerCostSettings, report_scheduler_cost

    settings = SchedulerCostSettings(
        trace=trace,
        model=model,
        gpu=gpu,
        answers=answers,
        max_requests=concurrency,
        kv_share=kv_share,
        streams=streams,
        rounds=repeats,
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
) -> None:
    """Serve the same load with one replica and with more, on this machine.

    The load is replayed answers through `apar serve`, forked and sequential. Replicas, gateway
    and client share the cores of one machine, so the CPU time per token is reported too. Example:
    [bold]apar experiment scale-out --trace TRACE.jsonl --answers 48 --repeats 1[/bold]
    """
    from cluster.lab.experiments.scale_out import ScaleOutSettings, report_scale_out

    if not trace.is_file():
        raise wrong_value("--trace", f"no file {trace}")
    settings = ScaleOutSettings(
        trace=trace,
        model=model,
        replicas=tuple(replicas),
        requests=answers,
        concurrency=concurrency,
        repeats=repeats,
    )
    with clear_errors():
        with stage_progress() as progress:
            runs = _measure(settings, out, progress)
        show_report(report_scale_out(settings, runs), out)


def _measure(settings: ScaleOutSettings, out: Path, progress: StageProgress) -> list[ReplicasRun]:
    from cluster.lab.experiments.parts import PartStore
    from cluster.lab.experiments.scale_out import run_replicas

    store = PartStore(out, settings.as_text())
    done = progress.start("numbers of replicas", len(settings.replicas))
    runs: list[ReplicasRun] = []
    for number in settings.replicas:
        runs += run_replicas(settings, number, out, store)
        done()
    return runs
