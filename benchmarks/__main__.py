"""Benchmarks on this machine: `python -m benchmarks`, or `make bench`.

Every figure is a ratio of two alternatives, measured in turn.
"""

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

from cluster.cli.options import CommaList, Concurrency, list_option, out_option
from cluster.durations import parse_duration

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import OfflineEngine

app = typer.Typer(
    add_completion=False,
    help="Measure on this machine. Every figure is a ratio of two alternatives, measured in turn.",
    pretty_exceptions_show_locals=False,
)
console = Console(width=140)
TRACE = Path("../shared/data/traces/structured.jsonl")

Repeats = Annotated[int, typer.Option(min=1, help="Repeats, after a warm-up.")]


@app.callback(invoke_without_command=True)
def everything(context: typer.Context) -> None:
    """Run all benchmarks, unless one is named."""
    if context.invoked_subcommand is not None:
        return
    for name in ("decoding", "decoders", "training", "serving"):
        if name == "training" and not TRACE.is_file():
            console.print(f"skipping training: {TRACE} does not exist")
            continue
        # Engines, torch settings and Ray each need a process of their own.
        subprocess.run([sys.executable, "-m", "benchmarks", name], check=True)


@app.command()
def decoding(
    out: Annotated[Path, out_option("decoding")],
    model: Annotated[str, typer.Option(help="Checkpoint; default: apar-tiny.")] = "",
    repeats: Repeats = 5,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at once; repeatable. Default: 1 and 32."),
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help="File with a question per line. Default: apar-tiny's own.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer at most.")] = 600,
    kv_cache_mib: Annotated[int, typer.Option(min=64, help="KV cache (MiB).")] = 512,
    eager: Annotated[bool, typer.Option("--eager", help="Disable torch.compile.")] = False,
) -> None:
    """Compare forked and sequential decoding of the same tokens, and count the cost of a fork."""
    engine = _replaying_engine(model, eager, kv_cache_mib)
    from benchmarks import decoding

    asked = [] if questions is None else questions.read_text().splitlines()
    try:
        results = decoding.run(
            engine, console, repeats=repeats, batch_sizes=batch_size or decoding.BATCH_SIZES,
            questions=[each for each in asked if each.strip()], max_tokens=max_tokens,
        )  # fmt: skip
    finally:
        engine.shutdown()
    _write(out, results)


@app.command()
def lists(
    out: Annotated[Path, out_option("lists")],
    questions: Annotated[
        list[Path], typer.Option(help="File with a question per line, or JSON lines; repeatable.")
    ],
    model: Annotated[str, typer.Option(help="Checkpoint folder of an instruct model.")] = "",
    max_tokens: Annotated[int, typer.Option(min=8)] = 400,
    requests: Annotated[
        list[int] | None, typer.Option(help="Concurrent requests of the speed runs; repeatable.")
    ] = None,
    repeats: Repeats = 3,
    speed_questions: Annotated[int, typer.Option(min=1, help="Questions of the speed runs.")] = 16,
    eager: Annotated[bool, typer.Option("--eager", help="Disable torch.compile.")] = False,
) -> None:
    """Compare ways to write lists in parallel with one thread: text, steps and time."""
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.models.smollm2 import SMOLLM2
    from apar_core.reporting import write_report
    from benchmarks import lists as benchmark

    engine = OfflineEngine(
        model or SMOLLM2.folder,
        max_model_len=2048,
        max_num_seqs=256,
        enforce_eager=eager,
        kv_cache_memory_bytes=2 << 30,
        additional_config={"apar": {"parallel_format": "lists"}},
    )
    asked: list[str] = []
    for path in questions:
        for line in path.read_text().splitlines():
            asked.append(json.loads(line)["turns"][0] if line.startswith("{") else line)
    out.mkdir(parents=True, exist_ok=True)
    report = benchmark.run(
        engine, [each for each in asked if each.strip()], out, console,
        max_tokens=max_tokens, requests=requests or [1, 8, 32], repeats=repeats,
        speed_questions=speed_questions,
    )  # fmt: skip
    write_report(report, out)
    for table in report.tables:
        console.print(table.as_markdown(), markup=False, soft_wrap=True)
    engine.shutdown()


@app.command()
def decoders(
    out: Annotated[Path, out_option("decoders")],
    repeats: Repeats = 5,
    answers: Annotated[int, typer.Option(min=1, help="Number of answers per repeat.")] = 12,
    cpu_threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads.")] = 1,
) -> None:
    """Compare the decoders five decoders on the same answers."""
    import torch

    from benchmarks import decoders

    torch.set_num_threads(cpu_threads)
    _write(out, decoders.run(console, repeats=repeats, num_answers=answers))


@app.command()
def training(
    out: Annotated[Path, out_option("training")],
    trace: Annotated[
        Path, typer.Option(help="JSON lines with prompt, history and response.", dir_okay=False)
    ] = TRACE,
) -> None:
    """Compare packed and written-out training: tokens of all trees, time of a sample."""
    from benchmarks import training

    if not trace.is_file():
        raise typer.BadParameter(f"{trace} does not exist", param_hint="--trace")
    _write(out, training.run(console, trace))


@app.command()
def serving(
    out: Annotated[Path, out_option("serving")],
    model: Annotated[str, typer.Option(help="Checkpoint or preset.")] = "apar-tiny",
    concurrency: Concurrency = 32,
    answers: Annotated[int, typer.Option(min=1, help="Number of answers per repeat.")] = 160,
    repeats: Repeats = 5,
    coalesce: Annotated[
        CommaList[float],
        list_option(
            "--coalesce",
            item=parse_duration,
            help="`coalesce_s` of apar serve; several are measured in turn. 0s: a chunk per step.",
            default="50ms,0s",
        ),
    ] = CommaList((0.05, 0.0)),
    stream_interval: Annotated[
        CommaList[int],
        list_option(
            "--stream-interval",
            item=int,
            minimum=1,
            help="Tokens per chunk of vLLM's server; several are measured in turn.",
            default="1,20",
        ),
    ] = CommaList((1, 20)),
    compiled: Annotated[bool, typer.Option("--compiled", help="Use torch.compile.")] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Ask for whole answers instead of streams.")
    ] = False,
    handle: Annotated[
        bool, typer.Option("--handle", help="Call replicas over Ray Serve's handle.")
    ] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Stop the other server while one is measured.")
    ] = False,
) -> None:
    """Compare the Ray Serve path with vLLM's own HTTP server, on unforked requests."""
    from benchmarks import serve_overhead

    out.mkdir(parents=True, exist_ok=True)
    results = serve_overhead.run(
        console,
        checkpoint=model,
        concurrency=concurrency,
        requests=answers,
        repeats=repeats,
        coalesce_s=(coalesce[0],) if whole else coalesce,
        stream_intervals=stream_interval,
        compiled=compiled,
        whole=whole,
        direct=not handle,
        alone=alone,
        out=out,
    )
    _write(out, results)


@app.command()
def metrics(
    out: Annotated[Path, out_option("metrics")],
    concurrency: Concurrency = 32,
    answers: Annotated[int, typer.Option(min=1, help="Number of answers.")] = 320,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 100,
) -> None:
    """Count the CPU time of metrics in a gateway and a replica, beside that of everything."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from benchmarks import metrics_cost

    _write(
        out,
        metrics_cost.run(console, concurrency=concurrency, requests=answers, num_tokens=tokens),
    )


@app.command("prompt-chain")
def prompt_chain(
    out: Annotated[Path, out_option("prompt-chain")],
    answers: Annotated[int, typer.Option(min=1, help="Number of answers.")] = 24,
) -> None:
    """Compare vLLM with and without a chain of prompt tokens, one request at a time."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from benchmarks import prompt_chain

    runs = [
        prompt_chain.run(console, num_answers=answers, forked=forked) for forked in (False, True)
    ]
    _write(out, {"runs": runs})


@app.command("family-grouping")
def family_grouping(
    out: Annotated[Path, out_option("family-grouping")],
    repeats: Annotated[int, typer.Option(min=20, help="Steps of each kind and size.")] = 1000,
) -> None:
    """Time the search for families of threads in a decoding step."""
    from benchmarks import family_grouping

    _write(out, family_grouping.run(console, repeats=repeats))


def _replaying_engine(model: str, eager: bool, kv_cache_mib: int) -> OfflineEngine:
    """Build an engine whose requests specify the tokens to generate."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # More threads do not speed up a small model.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from apar_core.engine.replay import REPLAY
    from cluster.cli.generate import start_engine

    return start_engine(
        model or "apar-tiny",
        block_size=32,
        max_num_seqs=512,
        enforce_eager=eager,
        logits_processors=[REPLAY],
        kv_cache_memory_bytes=kv_cache_mib << 20,
    )


def _write(folder: Path, results: dict[str, Any]) -> None:
    """Write the figures to `results.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    stamp = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    path.write_text(json.dumps(stamp | results, indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {path}")


if __name__ == "__main__":
    app()
