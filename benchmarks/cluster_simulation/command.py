"""`python -m benchmarks simulation`: the cluster's decisions under simulated load."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from benchmarks.cluster_simulation.step_times import ReplicaModel

app = typer.Typer(pretty_exceptions_show_locals=False, rich_markup_mode="markdown")
console = Console(width=200)
DATA = Path("../shared/data")
OUT = Path("out/simulation")
EXPERIMENTS = ("routing", "forking", "scaling")


Quick = Annotated[
    bool, typer.Option("--quick", help="Less than a minute; only to see that it runs.")
]
Full = Annotated[
    bool, typer.Option("--full", help="Also 512 replicas, at all loads: hours on one core.")
]
ModelNames = Annotated[
    list[str] | None,
    typer.Option(help="Step times: 7b-roofline or tiny-measured. Repeatable; both if absent."),
]
ExperimentNames = Annotated[
    list[str] | None,
    typer.Option(help="Experiment: routing, forking or scaling. Repeatable; all if absent."),
]
ReplicaCounts = Annotated[
    list[int] | None, typer.Option(help="Of the scenarios, only those with so many replicas.")
]
Loads = Annotated[
    list[float] | None, typer.Option(help="Of the scenarios, only those with such a load.")
]
PolicyNames = Annotated[
    list[str] | None,
    typer.Option("--policy", help="Of the ways to route, only this one. Repeatable."),
]
Jobs = Annotated[int, typer.Option(min=1, help="Processes that simulate routing side by side.")]
DataFolder = Annotated[
    Path, typer.Option(help="Folder with traces/ and arrivals/ as in ../shared/data.")
]
OutFolder = Annotated[Path, typer.Option(help="Folder for Markdown, CSV and PNG.")]


@app.callback(invoke_without_command=True)
def simulate(
    context: typer.Context,
    quick: Quick = False,
    full: Full = False,
    model: ModelNames = None,
    only: ExperimentNames = None,
    replicas: ReplicaCounts = None,
    load: Loads = None,
    policies: PolicyNames = None,
    jobs: Jobs = 1,
    data: DataFolder = DATA,
    out: OutFolder = OUT,
) -> None:
    """Simulate clusters: the product's own routers, fork policies and autoscaler under load.

    Takes about 10 minutes on one idle core; `--full` adds 512 replicas.

    **Routing**: the thread router against round robin, random, fewest requests, power of two
    choices, and an oracle that knows every tree and the true state of every replica.

    **Forking**: eager, adaptive and no forking as the load rises.

    **Scaling**: the load triples and falls back; the autoscaler follows.

    Load 1 is the rate that a saturated replica keeps up with when it forks eagerly. Requests come
    at recorded times (their bursts kept), with recorded prompt lengths and recorded answers.

    Examples: `python -m benchmarks simulation --quick`;
    `python -m benchmarks simulation --only routing --replicas 64 --load 0.95`.
    """
    if context.invoked_subcommand is not None:
        return
    # Imported here: --help shall not wait for matplotlib.
    from benchmarks.cluster_simulation import experiments, scenarios

    models = _models(model, only)
    _check_policies(policies)
    try:
        recorded = scenarios.RecordedData.read(data)
    except FileNotFoundError as error:
        console.print(f"[red]{error}[/red]; name the folder with --data")
        raise typer.Exit(1) from error
    plan = scenarios.build_plan(quick=quick, full=full).only(replicas, load, policies)
    out.mkdir(parents=True, exist_ok=True)
    for name in only or EXPERIMENTS:
        with _progress() as progress:
            begin = _stepper(progress, name)
            experiments.RUN[name](recorded, models, plan, out, console, begin, jobs)
    console.print(f"written to {out}")


def _models(model: list[str] | None, only: list[str] | None) -> list[ReplicaModel]:
    """The models that are asked for; refuses unknown names of models and experiments."""
    from benchmarks.cluster_simulation.step_times import MODELS

    unknown = [name for name in model or () if name not in MODELS]
    unknown += [name for name in only or () if name not in EXPERIMENTS]
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(unknown)}: models are {', '.join(MODELS)}, "
            f"experiments {', '.join(EXPERIMENTS)}"
        )
    return [MODELS[name] for name in model or MODELS]


def _check_policies(policies: list[str] | None) -> None:
    """Refuse unknown ways to route."""
    from benchmarks.cluster_simulation.choosers import CHOOSERS

    if unknown := [name for name in policies or () if name not in CHOOSERS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: policies are {', '.join(CHOOSERS)}")


@app.command()
def fit() -> None:
    """Measure the step times of apar-tiny's engine here, and fit the line that is simulated."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.models.apar_tiny import checkpoint_path
    from benchmarks.cluster_simulation.fit import fit_steps, measure_steps, print_fit

    engine = OfflineEngine(
        checkpoint_path(),
        block_size=32,
        max_num_seqs=256,
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
    )
    try:
        print_fit(console, fit_steps(measure_steps(engine)))
    finally:
        engine.shutdown()


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _stepper(progress: Progress, name: str) -> Callable[[int], Callable[[], None]]:
    def begin(total: int) -> Callable[[], None]:
        task = progress.add_task(name, total=total)
        return lambda: progress.advance(task)

    return begin
