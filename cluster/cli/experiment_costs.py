"""`apar experiment fork-cost`, `scheduler-cost` and `profile`: what forking costs, part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli.evaluation_progress import clear_errors, stage_progress
from cluster.cli.experiment_peers import Model, Out, Trace, show_report


def fork_cost(
    trace: Trace,
    out: Out = Path("out/experiments/fork-cost"),
    model: Model = "cpu-7b",
    answers: Annotated[int, typer.Option(min=1, help="Answers, drawn at random.")] = 32,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 32,
) -> None:
    """Count the tokens computed and the blocks copied per fork, beside prefix caching.

    Example: [bold]apar experiment fork-cost --trace TRACE.jsonl --answers 16[/bold]
    """
    from cluster.experiments.fork_cost_report import report_fork_cost
    from cluster.experiments.settings import ExperimentSettings

    settings = ExperimentSettings(
        model=model,
        trace=trace,
        answers=answers,
        block_size=block_size,
        kv_tokens=None,
        kv_shares=(1.0,),
        mixed_kv_shares=(1.0,),
    )
    with clear_errors(Console(stderr=True)), stage_progress(Console(stderr=True)) as progress:
        show_report(report_fork_cost(settings, out, progress.start), out)


def scheduler_cost(
    out: Out = Path("out/experiments/scheduler-cost"),
    threads: Annotated[int, typer.Option(min=8, help="Threads alive at once.")] = 2000,
    threads_per_request: Annotated[int, typer.Option(min=2, help="Of each request.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps in which all threads decode.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each scheduler.")] = 3,
) -> None:
    """Time the scheduler's own work a step, beside vLLM's with as many plain requests.

    No model runs: what is scheduled is answered at once. Example, in a minute:
    [bold]apar experiment scheduler-cost --threads 400 --rounds 1[/bold]
    """
    from cluster.experiments.scheduler_report import SchedulerLoadSettings, report_scheduler_cost

    if threads % threads_per_request:
        raise typer.BadParameter(
            f"--threads {threads} is no multiple of --threads-per-request {threads_per_request}"
        )
    settings = SchedulerLoadSettings(
        num_threads=threads, threads_per_request=threads_per_request, steps=steps, rounds=rounds
    )
    with clear_errors(Console(stderr=True)), stage_progress(Console(stderr=True)) as progress:
        show_report(report_scheduler_cost(settings, out, progress.start), out)


def profile(
    trace: Trace,
    out: Out = Path("out/experiments/profile"),
    model: Model = "cpu-7b",
    requests: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 350,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 40,
    warm_steps: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 60,
    answers: Annotated[int, typer.Option(min=1, help="Different answers of the trace.")] = 350,
) -> None:
    """Time every part of a step with many requests: sequential, eager and adaptive.

    Parts: schedule, model inputs, model forward, logits, logits processors, sampling, sampled
    tokens to lists, scheduler update, output processing, detokenising. Example, in 2 minutes:
    [bold]apar experiment profile --trace TRACE.jsonl --requests 50[/bold]
    """
    from cluster.experiments.profile_report import profile_settings, report_profile
    from cluster.experiments.step_profile import ProfileLoad

    load = ProfileLoad(num_requests=requests, warm_steps=warm_steps, steps=steps)
    settings = profile_settings(trace=trace, model=model, answers=answers, load=load)
    with clear_errors(Console(stderr=True)), stage_progress(Console(stderr=True)) as progress:
        show_report(report_profile(settings, load, out, progress.start), out)
