"""`apar experiment scale-out`: throughput with more replicas, measured and simulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cluster.cli.evaluation_progress import StageProgress, clear_errors, stage_progress
from cluster.cli.experiment_peers import Out, Trace, show_report

if TYPE_CHECKING:
    from cluster.experiments.scale_out import ReplicasRun, ScaleOutSettings
    from cluster.experiments.simulated_scale_out import SimulatedClusters

_SIMULATED_REPLICAS = (1, 2, 4, 8, 16, 32)


def scale_out(
    trace: Trace,
    out: Out = Path("out/experiments/scale-out"),
    model: Annotated[str, typer.Option(help="Preset or checkpoint that is served.")] = "apar-tiny",
    replicas: Annotated[
        list[int] | None, typer.Option(min=1, help="Replicas; repeatable: 1 and 2.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Answers of a repeat.")] = 96,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of the load.")] = 3,
    simulated_s: Annotated[
        float, typer.Option(min=0, help="Seconds of simulated arrivals; 0 simulates nothing.")
    ] = 60.0,
    simulated_model: Annotated[
        str, typer.Option(help="Step times of the simulation: 7b-roofline or tiny-measured.")
    ] = "7b-roofline",
    data: Annotated[
        Path, typer.Option(help="Folder with traces/ and arrivals/ for the simulation.")
    ] = Path("../shared/data"),
) -> None:
    """Serve with 1 and 2 replicas under the same load, and simulate more than fit here.

    The load is replayed answers through `apar serve`, forked and sequential. Replicas of one
    machine share its cores with gateway and client: the CPU time of a token is reported too.
    Example: [bold]apar experiment scale-out --trace TRACE.jsonl --requests 48 --repeats 1[/bold]
    """
    from cluster.experiments.scale_out import ScaleOutSettings
    from cluster.experiments.scale_out_report import report_scale_out
    from cluster.experiments.simulated_scale_out import can_simulate, check_model, find_repository

    find_repository()
    simulates = simulated_s > 0 and can_simulate(data)
    settings = ScaleOutSettings(
        trace=trace,
        model=model,
        replicas=tuple(replicas or (1, 2)),
        requests=requests,
        concurrency=concurrency,
        repeats=repeats,
    )
    with clear_errors(Console(stderr=True)):
        if simulates:
            check_model(simulated_model)
        with stage_progress(Console(stderr=True)) as progress:
            runs = _measure(settings, out, progress)
            simulated = None
            if simulates:
                simulated = _simulate(data, simulated_model, simulated_s, progress)
        show_report(report_scale_out(settings, runs, simulated, wanted=simulated_s > 0), out)


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
