"""`apar experiment`: the paper's high-throughput experiments, and comparisons beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.options import RESUMABLE, out_option, wrong_value
from cluster.cli.settings_options import takes_settings
from cluster.cli.terminal import clear_errors, show_report, stage_progress
from cluster.lab.experiments.settings import (
    ExperimentSettings,
    FamilyAttentionSettings,
    Grid,
    JoinSettings,
    ScaleOutSettings,
    SchedulerCostSettings,
    ValidationSettings,
)
from cluster.lab.simulation.settings import GoodputSettings

if TYPE_CHECKING:
    from apar_core.reporting import Report

experiment = typer.Typer(
    no_args_is_help=True,
    help="Measure forking under load as section 3.4 of the APAR paper does: recorded answers are "
    "replayed token by token, forked and sequentially, by vLLM's scheduler in virtual time, which "
    "predicts a GPU's, or by a real engine. Example: "
    "[bold]apar experiment fig5a --trace ANSWERS.jsonl --quick[/bold]",
    rich_markup_mode="rich",
)

# Options of settings that have other names.
_NAMES = {
    "models": "model",
    "gpus": "gpu",
    "concurrencies": "concurrency",
    "limits": "concurrency",
    "rounds": "repeats",
    "max_tokens": "context-length",
    "sample_s": "sample-every",
    "growth_reserve_tokens": "growth-reserve",
    "is_async": "async-scheduling",
    "round_trips_ms": "round-trips",
    "engine": "engine-args",
}
_takes = partial(takes_settings, names=_NAMES)
# `--engine` chooses the kind of engine where there are both.
_takes_engine = partial(
    takes_settings, names={name: own for name, own in _NAMES.items() if name != "engine"}
)
Workers = Annotated[
    int | None, typer.Option(min=1, help="Processes for virtual runs.", show_default="all cores")
]
Jobs = Annotated[int, typer.Option(min=1, help="Processes that search in parallel.")]


def _out(name: str) -> Any:
    return out_option(f"experiment-{name}", help=RESUMABLE)


def _run(
    report: Callable[..., Report],
    settings: Any,
    out: Path,
    hidden: Collection[str] = (),
    folder: Path | None = None,
    **options: Any,
) -> None:
    """Make a report from the runs in `out`, and write it to `folder`, by default the same."""
    with clear_errors():
        with stage_progress() as progress:
            made = report(settings, out, progress.start, **options)
        show_report(made, folder or out, hidden=hidden)


@experiment.command()
@_takes(Grid, shown={"rows": "1,2,4,...,128"})
def calibrate(settings: Grid, out: Annotated[Path, _out("calibrate")]) -> None:
    """Measure how long the steps of an engine take, and write them to step-costs.json.

    Other commands take the file as --costs. Measures every number of rows at every context, with
    and without a prompt beside them. For a GPU, give rows up to the largest batch:

    [bold]apar experiment calibrate --random-weights llama-7b --rows 1,8,32,64,128,256[/bold]
    """
    from cluster.lab.experiments.calibrate import calibrate as measure

    _run(measure, settings, out)


@experiment.command(no_args_is_help=True)
@_takes(ValidationSettings)
def validate(settings: ValidationSettings, out: Annotated[Path, _out("validate")]) -> None:
    """Compare the measured duration of whole runs with predictions in virtual time.

    Real runs and step measurements alternate. The step costs are fitted three times: to a grid of
    steps, to sequential runs, and to the smallest limit. Each fit predicts the runs it did not see.
    On a GPU, the grid and, if the GPU is known, its published costs predict all runs.
    step-costs.json holds the grid's costs, for --costs of other commands. Takes about 5 minutes on
    2 idle cores:

    [bold]apar experiment validate --trace TRACE.jsonl --repeats 5[/bold]

    On a GPU, without a checkpoint:

    [bold]apar experiment validate --trace TRACE.jsonl --random-weights llama-7b --answers 400
    --context-length 2048 --concurrency 350 --kv-shares 0.9,0.3 --repeats 1[/bold]
    """
    from cluster.lab.experiments.validate import validate as measure

    _run(measure, settings, out)


def _add_figure(name: str, text: str) -> None:
    @experiment.command(name, no_args_is_help=True)
    @_takes_engine(
        ExperimentSettings,
        shown={
            "kv_tokens": "what fits into the memory",
            "max_requests": "350, and 180 for models of more than 10 billion parameters",
            "kv_shares": "0.1,0.2,0.3,0.5,0.7,0.9; peers 0.3,0.9",
            "methods": "sequential,eager,adaptive; peers all but lists",
        },
        leave_out=("peer_shares", "peer_methods"),
        text=f"""{text}

        By default a GPU's times are predicted in virtual time. All experiments share the runs in
        --out, and an interrupted run continues there. Example:
        [bold]apar experiment {name} --trace ANSWERS.jsonl --quick[/bold]
        """,
    )
    def command(
        settings: ExperimentSettings,
        out: Annotated[Path, out_option("experiment", help=RESUMABLE)],
        workers: Workers = None,
    ) -> None:
        from cluster.lab.experiments.report import run_experiment

        # The ratios of all experiments are too many for a terminal.
        hidden = ("runs", "ratios") if name == "all" else ("runs",)
        workers = workers or os.cpu_count() or 1
        _run(partial(run_experiment, name), settings, out, hidden, out / name, workers=workers)


_FIGURES: Mapping[str, str] = {
    "fig5a": "Predict or measure throughput at several sizes of the KV cache: figure 5a.",
    "fig5b": "Predict or measure the mean latency at several concurrencies: figure 5b.",
    "table1": "Count the max cached tokens in the runs of figure 5a: table 1.",
    "table2": "Count the attended tokens in the runs of figure 5a: table 2.",
    "peers": "Compare methods of parallel answering: sequential decoding, ours (eager and "
    "adaptive), forking by the client, skeleton-of-thought, and a parent that stops for its "
    "children.",
    "all": "Run figures 5a and 5b, tables 1 and 2 and the peers, for all --model and --gpu.",
}
for _name, _text in _FIGURES.items():
    _add_figure(_name, _text)


@experiment.command(no_args_is_help=True)
@_takes_engine(
    ExperimentSettings,
    only=("engine", "models", "trace", "answers", "block_size", "engine_args"),
    defaults={"answers": 200},
)
def fork_cost(settings: ExperimentSettings, out: Annotated[Path, _out("fork-cost")]) -> None:
    """Count computed tokens and copied blocks per fork, compared with prefix caching.

    Example: [bold]apar experiment fork-cost --trace TRACE.jsonl --answers 16[/bold]
    """
    from cluster.lab.experiments.fork_cost import report_fork_cost

    _run(report_fork_cost, settings, out)


@experiment.command(no_args_is_help=True)
@_takes(
    FamilyAttentionSettings,
    shown={"max_requests": "350, and 180 for llama-13b"},
    only=(
        "trace", "mixed_trace", "models", "gpus", "answers", "max_requests", "kv_shares",
        "concurrencies", "system_tokens", "seed",
    ),
)  # fmt: skip
def family_attention(
    settings: FamilyAttentionSettings,
    out: Annotated[Path, _out("family-attention")],
    workers: Workers = None,
) -> None:
    """Predict family attention: threads of a request read the KV blocks that they share once.

    Compares it with forked and sequential decoding as they are. Example:
    [bold]apar experiment family-attention --trace ANSWERS.jsonl --model llama-7b[/bold]
    """
    from cluster.lab.experiments.family_attention import report_family_attention

    hidden, workers = ("costs", "thresholds"), workers or os.cpu_count() or 1
    _run(report_family_attention, settings, out, hidden, workers=workers)


@experiment.command()
@_takes(JoinSettings, leave_out=("max_tokens",))
def joins(settings: JoinSettings, out: Annotated[Path, _out("joins")]) -> None:
    """Compare ways to write answers whose threads join: by the engine, by a client, in sequence.

    Predicts a GPU's times. Recorded answers become outlines, threads and a conclusion. Example:
    [bold]apar experiment joins --trace TRACE.jsonl --concurrency 1,8[/bold]
    """
    from cluster.lab.experiments.joins import report_joins

    _run(report_joins, settings, out)


@experiment.command(no_args_is_help=True)
@_takes(GoodputSettings, leave_out=("costs", "attention", "kv_tokens"), shown={"slo": ""})
def goodput(
    settings: GoodputSettings, out: Annotated[Path, _out("goodput")], jobs: Jobs = 1
) -> None:
    """Find the goodput of fork policies: the highest rate at which requests meet an SLO.

    Predicts a GPU's times. Example:
    [bold]apar experiment goodput --trace TRACE.jsonl --slo ttft=1s,tpot=40ms --jobs 2[/bold]
    """
    # Imports vLLM, which takes seconds.
    from cluster.lab.simulation.goodput import report_goodput

    _run(report_goodput, settings, out, jobs=jobs)


@experiment.command(no_args_is_help=True)
@_takes(SchedulerCostSettings)
def scheduler_cost(
    settings: SchedulerCostSettings, out: Annotated[Path, _out("scheduler-cost")]
) -> None:
    """Time the engine's own Python per row: vLLM's scheduler, and ours with and without forks.

    Engines run in virtual time, so nothing but the scheduler and the output processor takes time.
    Example: [bold]apar experiment scheduler-cost --trace TRACE.jsonl --repeats 1[/bold]
    """
    from cluster.lab.experiments.scheduler_cost import report_scheduler_cost

    _run(report_scheduler_cost, settings, out)


@experiment.command(no_args_is_help=True)
@_takes(ScaleOutSettings)
def scale_out(settings: ScaleOutSettings, out: Annotated[Path, _out("scale-out")]) -> None:
    """Serve the same load with one replica and with more, on this machine.

    The load is replayed answers through `apar serve`, forked and sequential. Replicas, gateway
    and client share the cores of one machine, so the CPU time per token is reported too. Example:
    [bold]apar experiment scale-out --trace TRACE.jsonl --answers 48 --repeats 1[/bold]
    """
    if not settings.trace.is_file():
        raise wrong_value("--trace", f"no file {settings.trace}")
    from cluster.lab.experiments.scale_out import report_scale_out

    _run(report_scale_out, settings, out)
