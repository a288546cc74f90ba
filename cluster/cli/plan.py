"""`apar plan`: replicas, caps and KV cache for a load."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from apar_core.errors import AparError
from cluster.cli import plan_options as options
from cluster.cli.numbers import check_finite
from cluster.cli.plan_request import PlanRequest
from cluster.sizing.deployment import cluster_yaml, overlay_values
from cluster.sizing.plan import Plan, make_plan
from cluster.sizing.reasons import Section, reasons

_VALUE_WIDTH = 30


def plan(
    context: typer.Context,
    rate: options.Rate = None,
    users: options.Users = None,
    think_time_s: options.ThinkTime = 0.0,
    prompt_tokens: options.PromptTokens = 140,
    answer_tokens: options.AnswerTokens = 300,
    forks: options.Forks = "mixed",
    trace: options.Trace = None,
    first_token_s: options.FirstToken = None,
    token_ms: options.TokenTime = None,
    latency_s: options.Latency = None,
    headroom: options.Headroom = 0.2,
    target_utilization: options.Utilization = 0.8,
    spare: options.Spare = 1,
    model: options.Model = "apar-7b",
    parameters: options.Parameters = None,
    layers: options.Layers = None,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = None,
    dtype: options.Dtype = None,
    max_model_len: options.MaxModelLen = None,
    gpu: options.GpuName = None,
    gpu_memory_gib: options.GpuMemory = None,
    gpu_bandwidth_gb_s: options.GpuBandwidth = None,
    gpu_tflops: options.GpuTflops = None,
    gpu_memory_utilization: options.GpuUtilization = 0.9,
    tensor_parallel: options.TensorParallel = 1,
    kv_cache_gib: options.KvCacheGib = None,
    block_size: options.BlockSize = None,
    step_time_base_ms: options.StepBase = None,
    step_time_per_thread_ms: options.StepThread = None,
    step_time_per_prompt_token_us: options.StepPrompt = 0.0,
    measure_from: options.MeasureFrom = None,
    measure_s: options.MeasureSeconds = 30.0,
    min_replicas: options.MinReplicas = None,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Plan a cluster for a load: KV cache, caps, replicas, with the reason of each figure.

    Ends with the YAML for [bold]apar serve --config[/bold] and the values of a Kubernetes overlay.
    Example: [bold]apar plan --rate 20 --model apar-7b --gpu a100-80g --token-ms 50[/bold]
    """
    try:
        _plan(_request(context), context.params["out"], as_json=as_json)
    except (AparError, OSError) as error:
        Console(stderr=True).print(f"[red]Error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error


def _request(context: typer.Context) -> PlanRequest:
    """What was asked for; raises typer.BadParameter for a number that is none."""
    check_finite(context)
    values = {name: each for name, each in context.params.items() if name not in ("out", "as_json")}
    return PlanRequest.model_validate(values)


def _plan(request: PlanRequest, out: Any, *, as_json: bool) -> None:
    size = request.size()
    memory = request.memory(size)
    made = make_plan(request.goals, request.shape(size), request.costs(size), memory)
    served = request.served()
    text, overlay = cluster_yaml(made, served), overlay_values(made, served)
    if out is not None:
        out.write_text(text, encoding="utf-8")
    sections = reasons(made, size, request.tensor_parallel)
    if as_json:
        typer.echo(json.dumps(_content(made, sections, text, overlay)))
        return
    _print(sections)
    typer.echo(f"\n# For `apar serve --config`, or `cluster` of a Kubernetes overlay\n{text}")
    typer.echo("# For the overlay's kustomization")
    for name, value in overlay.items():
        typer.echo(f"{name}: {value}")


def _print(sections: list[Section]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=_VALUE_WIDTH)
    table.add_column(style="dim", overflow="fold")
    for number, (title, lines) in enumerate(sections):
        if number:
            table.add_row()
        table.add_row(Text(title, style="bold cyan"))
        for line in lines:
            table.add_row(f"  {line.name}", Text(line.value), Text(line.reason))
    Console().print(table)


def _content(
    made: Plan, sections: list[Section], text: str, overlay: dict[str, Any]
) -> dict[str, Any]:
    """The plan as JSON: its figures, the same in words, and the settings."""
    return {
        "replicas": made.replicas,
        "serving_replicas": made.serving_replicas,
        "max_concurrency": made.caps.requests,
        "threads": made.threads,
        "kv_blocks": made.memory.blocks,
        "kv_tokens": made.memory.tokens,
        "expected_kv_share": made.expected_kv_share,
        **{
            name: dataclasses.asdict(getattr(made, name))
            for name in ("goals", "shape", "costs", "caps", "most", "expected")
        },
        "reasons": {
            title: [dataclasses.asdict(line) for line in lines] for title, lines in sections
        },
        "config": text,
        "overlay": overlay,
    }
