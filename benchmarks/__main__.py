"""`make bench`: forked against sequential decoding, fork policies, the cost of serving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from benchmarks.cluster_simulation.command import app as simulation

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import OfflineEngine

app = typer.Typer(
    no_args_is_help=False,
    help="Measure on this machine. Every figure is a ratio of two things that run in turn.",
    pretty_exceptions_show_locals=False,
)
app.add_typer(simulation, name="simulation")
console = Console(width=140)
TRACE = Path("../shared/data/traces/structured.jsonl")


@app.callback(invoke_without_command=True)
def everything(context: typer.Context) -> None:
    """Run all benchmarks, unless one is named."""
    if context.invoked_subcommand is None:
        decoding()
        # A second engine gets a process of its own.
        subprocess.run([sys.executable, "-m", "benchmarks", "fork-policy"], check=True)
        decoders()
        if TRACE.is_file():
            training()
        else:
            console.print(f"training is left out: there is no {TRACE}")
        serving()
        cluster_cost()


@app.command()
def decoding(
    model: Annotated[str, typer.Option(help="Checkpoint; apar-tiny by default.")] = "",
    rounds: Annotated[int, typer.Option(help="Rounds after one that warms up.")] = 5,
    eager: Annotated[bool, typer.Option(help="Do without torch.compile.")] = False,
) -> None:
    """Forked against sequential decoding of the same tokens, and the cost of a fork."""
    engine = _replaying_engine(model, eager)
    from benchmarks import decoding, fork_cost

    try:
        results = decoding.run(engine, console, rounds=rounds)
        results |= fork_cost.run(engine, console)
    finally:
        engine.shutdown()
    write("decoding", results)


@app.command()
def fork_policy(
    model: Annotated[str, typer.Option(help="Checkpoint; apar-tiny by default.")] = "",
    requests: Annotated[int, typer.Option(min=2, help="Requests of a round at each load.")] = 50,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with arrivals of its own.")] = 2,
    slo: Annotated[
        float, typer.Option(min=1, help="SLO as a multiple of an unforked lone request's token.")
    ] = 3.0,
    target: Annotated[
        float, typer.Option(help="The adaptive policy's time per token, as a share of the SLO.")
    ] = 0.8,
    cpu_time: Annotated[
        bool, typer.Option(help="Count this process's CPU time, where others share the machine.")
    ] = False,
    eager: Annotated[bool, typer.Option(help="Do without torch.compile.")] = False,
) -> None:
    """No forks, eager forks and adaptive ones under rising load."""
    engine = _replaying_engine(model, eager)
    from benchmarks import fork_policy

    try:
        results = fork_policy.run(
            engine,
            console,
            requests=requests,
            rounds=rounds,
            slo_multiple=slo,
            target=target,
            cpu_time=cpu_time,
        )
    finally:
        engine.shutdown()
    write("fork-policy", results)


@app.command()
def decoders(
    rounds: Annotated[int, typer.Option(help="Rounds after one that warms up.")] = 5,
    answers: Annotated[int, typer.Option(help="Answers of a round.")] = 12,
    executors: Annotated[int, typer.Option(min=1, help="CPU threads to use.")] = 1,
) -> None:
    """Plain, vanilla_apar and medusa_apar on transformers, replaying the same answers."""
    import torch

    from benchmarks import decoders

    torch.set_num_threads(executors)
    write("decoders", decoders.run(console, rounds=rounds, num_answers=answers))


@app.command()
def serving() -> None:
    """The Ray Serve path against vLLM's own HTTP server, on unforked traffic."""
    # A process of its own: Ray's settings are read at import.
    subprocess.run([sys.executable, "-m", "benchmarks.serve_overhead"], check=True)


@app.command("cluster-cost")
def cluster_cost() -> None:
    """What keys, queue and router add to a request, stage by stage, against a bare relay."""
    # As for `serving`.
    subprocess.run([sys.executable, "-m", "benchmarks.cluster_cost"], check=True)


@app.command()
def training(
    trace: Annotated[
        Path, typer.Option(help="JSON lines with prompt, history and response.")
    ] = TRACE,
) -> None:
    """Packed against written-out training: tokens of all trees, seconds of a sample."""
    from benchmarks import training

    if not trace.is_file():
        console.print(f"no trace at {trace}: give one with --trace")
        raise typer.Exit(1)
    write("training", training.run(console, trace))


def _replaying_engine(model: str, eager: bool) -> OfflineEngine:
    """An engine whose requests can be told what to generate."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # A small model gains nothing from threads that wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Imported here: --help shall not wait for torch and vLLM.
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.engine.replay import REPLAY
    from apar_core.models.apar_tiny import checkpoint_path

    return OfflineEngine(
        model or checkpoint_path(),
        block_size=32,
        max_num_seqs=512,
        enforce_eager=eager,
        logits_processors=[REPLAY],
        kv_cache_memory_bytes=512 << 20,
    )


def write(name: str, results: dict[str, Any]) -> None:
    """Keep the figures in out/NAME.json."""
    path = Path("out") / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    stamp = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    path.write_text(json.dumps(stamp | results, indent=2) + "\n")
    console.print(f"written to {path}")


if __name__ == "__main__":
    app()
