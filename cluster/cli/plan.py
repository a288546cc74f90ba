"""`apar plan`: hardware, replicas and concurrency limits for a load, found in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cluster.cli.options import AsJson
from cluster.cli.settings_options import takes_settings
from cluster.cli.terminal import clear_errors, print_table, stage_progress
from cluster.lab.sizing.settings import PlanSettings

_PANELS = {
    "Load": (
        "rate", "users", "think_time_s", "prompt_tokens", "answer_tokens", "forks", "trace",
        "arrivals",
    ),
    "Limits, kept by 99% of the requests": (
        "first_token_s", "token_s", "latency_s", "headroom", "spare",
    ),
    "Model": ("model", "dtype", "max_model_len"),
    "GPU": (
        "gpu", "tensor_parallel", "gpu_memory_utilization", "prices", "costs", "kv_tokens",
        "block_size", "attention",
    ),
    "Search": ("caps", "requests", "seed"),
    "Output": ("min_replicas",),
}  # fmt: skip


@takes_settings(PlanSettings, panels=_PANELS)
def plan(
    settings: PlanSettings,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes for simulated runs.", rich_help_panel="Search")
    ] = 2,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write the YAML to as well.", dir_okay=False, rich_help_panel="Output"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a cluster for a load: GPU, replicas and concurrency limit, by simulated runs.

    Each candidate serves requests at several rates in virtual time: vLLM's own scheduler and KV
    cache with this project's forks, where only the duration of a step is modeled. Ends with the
    YAML for [bold]apar serve --config[/bold] and the parameters of a Kubernetes overlay. Takes a
    minute per GPU on two cores. Example:
    [bold]apar plan --rate 20 --model apar-7b --gpu a100-80gb,h100 --token 50ms[/bold]
    """
    from cluster.lab.sizing.deployment import cluster_yaml, overlay_values
    from cluster.lab.sizing.report import candidates_table, content, recommendation

    with clear_errors():
        with stage_progress() as progress:
            made = settings.answer(processes, progress.start)
        text, overlay = cluster_yaml(made, settings), overlay_values(made, settings)
        if out is not None:
            out.write_text(text, encoding="utf-8")
        size = settings.size
        facts = recommendation(made, size.name, size.kv_bytes_per_token)
    if as_json:
        typer.echo(json.dumps(content(made, facts, text, overlay)))
        return
    console = Console()
    for name, fact in facts.items():
        console.print(f"[bold]{name}[/bold]: {escape(fact)}", highlight=False)
    print_table(candidates_table(made))
    typer.echo(f"# For `apar serve --config`, or `cluster` of a Kubernetes overlay\n{text}")
    typer.echo("# For the overlay's parameters.env")
    for name, value in overlay.items():
        typer.echo(f"{name}={value}")
