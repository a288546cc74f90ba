"""`apar plan`: hardware, replicas and concurrency limits for a load, found in virtual time."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from apar_core.attention.settings import FamilySettings
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.files import read_costs
from apar_core.step_costs.gpus import GPUS, find_gpu
from apar_core.step_costs.models import ModelSize, find_model
from apar_core.step_costs.predict import kv_tokens, step_costs
from cluster.cli.options import (
    BLOCK_SIZE_HELP,
    DTYPE_HELP,
    MODEL_HELP,
    TRACE_HELP,
    AsJson,
    CommaList,
    Duration,
    Seed,
    duration_option,
    list_option,
    none_of,
    preset_names,
    wrong_value,
)
from cluster.cli.terminal import clear_errors, print_table, stage_progress
from cluster.lab.sizing.deployment import Served, cluster_yaml, overlay_values
from cluster.lab.sizing.errors import SizingError
from cluster.lab.sizing.plan import Load, Plan, Started, make_plan
from cluster.lab.sizing.replica_run import Slos
from cluster.lab.sizing.report import candidates_table, content, recommendation
from cluster.lab.sizing.requests import PROFILES, Workload
from cluster.lab.sizing.search import Conditions, Replica, runner

CPU = "cpu"
# vLLM's default tokens per step for its server (0.32, engine/arg_utils.py).
_LARGE_GPU_BYTES = 70 * 2**30
_STEP_TOKENS, _LARGE_STEP_TOKENS = 2048, 8192
_BLOCK_SIZE, _CPU_BLOCK_SIZE = 16, 32
_CONTEXT = 4096

_LOAD, _LIMITS, _MODEL = "Load", "Limits, kept by 99% of the requests", "Model"
_GPU, _SEARCH, _OUTPUT = "GPU", "Search", "Output"
_POSITIVE = 1e-9


def plan(
    context: typer.Context,
    rate: Annotated[
        float | None,
        typer.Option(min=_POSITIVE, help="Requests per second.", rich_help_panel=_LOAD),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Instead of --rate: users who send their next request after the answer.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    think_time: Annotated[
        float,
        duration_option(
            help="With --users: time between an answer and the next request.", panel=_LOAD
        ),
    ] = Duration.of("0s"),
    prompt_tokens: Annotated[
        float, typer.Option(min=1, help="Mean length of a prompt (tokens).", rich_help_panel=_LOAD)
    ] = 140,
    answer_tokens: Annotated[
        float, typer.Option(min=1, help="Mean length of an answer (tokens).", rich_help_panel=_LOAD)
    ] = 300,
    forks: Annotated[
        str,
        typer.Option(help=f"How answers fork: {', '.join(PROFILES)}.", rich_help_panel=_LOAD),
    ] = "mixed",
    trace: Annotated[
        Path | None,
        typer.Option(
            help=f"{TRACE_HELP} Replaces the lengths and --forks.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            help="Recorded arrival times, scaled to each rate: CSV with TIMESTAMP, or seconds "
            "(default: Poisson arrivals).",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    first_token: Annotated[
        float,
        duration_option(help="Time to the first token.", minimum="1us", panel=_LIMITS),
    ] = Duration.of("2s"),
    token: Annotated[
        float | None,
        duration_option(
            help="Time per token after the first, on the critical path of the answer.",
            minimum="1us",
            panel=_LIMITS,
        ),
    ] = None,
    latency: Annotated[
        float | None,
        duration_option(help="Time to the end of the answer.", minimum="1us", panel=_LIMITS),
    ] = None,
    headroom: Annotated[
        float,
        typer.Option(
            min=0, help="Growth of the load to plan for, as a share of it.", rich_help_panel=_LIMITS
        ),
    ] = 0.2,
    spare: Annotated[
        int,
        typer.Option(
            min=0, help="Replicas that may be missing, as in a rollout.", rich_help_panel=_LIMITS
        ),
    ] = 1,
    model: Annotated[
        str,
        typer.Option(
            help=f"{MODEL_HELP} Or llama-7b, llama-13b, llama-3-8b, llama-3-70b or a config.json.",
            rich_help_panel=_MODEL,
            autocompletion=preset_names,
        ),
    ] = "apar-7b",
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP, rich_help_panel=_MODEL)] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=16,
            help="Context length to serve (tokens; default: the model's).",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    gpu: Annotated[
        CommaList[str],
        list_option(
            help=f"GPUs to compare: {', '.join(GPUS)}. Another name, or cpu, needs --costs and "
            "--kv-tokens."
        ),
    ] = CommaList(["a100-80gb"]),
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="GPUs per replica.", rich_help_panel=_GPU)
    ] = 1,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            min=0.01, max=1, help="Share of a GPU's memory for vLLM.", rich_help_panel=_GPU
        ),
    ] = 0.9,
    prices: Annotated[
        CommaList[float] | None,
        list_option(
            item=float,
            minimum=0,
            default=False,
            help="Price per GPU and hour, one for each --gpu. The recommendation is then the "
            "cheapest, not the one with the fewest GPUs.",
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Step costs as `apar experiment calibrate` writes them; replaces the tables.",
            rich_help_panel=_GPU,
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            "--kv-tokens",
            min=16,
            help="Tokens of KV cache per replica, as vLLM prints at its start (default: computed "
            "from the memory).",
            rich_help_panel=_GPU,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"{BLOCK_SIZE_HELP} Default: 16, with cpu 32.", rich_help_panel=_GPU
        ),
    ] = None,
    attention: Annotated[
        str,
        typer.Option(
            help="ordinary, or family: threads of a request read shared KV blocks once.",
            metavar="ordinary|family",
            rich_help_panel=_GPU,
        ),
    ] = "ordinary",
    caps: Annotated[
        CommaList[int] | None,
        list_option(
            item=int,
            minimum=1,
            default=False,
            help="Limits on concurrent requests to try (default: the largest that keeps --token "
            "and fits into the KV cache, and 60% of it).",
        ),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            min=100,
            help="Requests measured in a run of the search; the last run has 2.5 times as many.",
            rich_help_panel=_SEARCH,
        ),
    ] = 400,
    seed: Seed = 0,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes for simulated runs.", rich_help_panel=_SEARCH)
    ] = 2,
    min_replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Configure autoscaling down to this number of replicas.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write the YAML to as well.", dir_okay=False, rich_help_panel=_OUTPUT
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
    for name, value in context.params.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise wrong_value(f"--{name.replace('_', '-')}", f"{value} is not a finite number.")
    if (rate is None) == (users is None):
        raise typer.BadParameter("give either --rate or --users")
    if attention not in ("ordinary", "family"):
        raise wrong_value("--attention", none_of(attention, ("ordinary", "family")))
    if forks not in PROFILES:
        raise wrong_value("--forks", none_of(forks, PROFILES))
    if costs is not None and len(gpu) != 1:
        raise wrong_value("--costs", f"is for one GPU, and --gpu names {len(gpu)}")
    if kv_tokens is not None and len(gpu) != 1:
        raise wrong_value("--kv-tokens", f"is for one GPU, and --gpu names {len(gpu)}")
    if prices is not None and len(prices) != len(gpu):
        raise wrong_value("--prices", f"has {len(prices)} prices for {len(gpu)} GPUs")
    with clear_errors():
        size = find_model(model, None if dtype == "auto" else dtype)
        engines = EngineOptions(
            size,
            max_model_len or size.max_positions or _CONTEXT,
            tensor_parallel,
            gpu_memory_utilization,
            block_size,
            kv_tokens,
            None if costs is None else read_costs(costs),
            reads_families=attention == "family",
        )
        question = Question(
            Load(rate, users, think_time, headroom, spare),
            Conditions(
                Workload(trace, forks, prompt_tokens, answer_tokens),
                Slos(first_token, token, latency),
                engines.max_model_len,
                arrivals,
                requests,
                seed,
            ),
            tuple(engines.replica(name) for name in gpu),
            tuple(caps or ()),
            tuple(prices or ()),
        )
        with stage_progress() as progress:
            made = question.answer(processes, progress.start)
        served = Served(
            model=model,
            tensor_parallel=tensor_parallel,
            gpu_memory_share=None if CPU in gpu else gpu_memory_utilization,
            weight_bytes=size.weight_bytes,
            kv_bytes=made.hardware.kv_tokens * size.kv_bytes_per_token,
            max_model_len=max_model_len,
            block_size=block_size,
            min_replicas=min_replicas,
        )
        _show(made, size, served, out, as_json=as_json)


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that a plan depends on."""

    load: Load
    conditions: Conditions
    replicas: tuple[Replica, ...]
    caps: tuple[int, ...] = ()
    prices: tuple[float, ...] = ()

    def answer(self, processes: int, started: Started) -> Plan:
        """Make the plan. Raises SizingError if there is none."""
        with runner(self.replicas, self.conditions, processes) as runs:
            return make_plan(self.load, runs, caps=self.caps, prices=self.prices, started=started)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The model and how engines run it; `kv_tokens` and `costs` replace what is predicted."""

    size: ModelSize
    max_model_len: int
    tensor_parallel: int = 1
    memory_share: float = 0.9
    block_size: int | None = None
    kv_tokens: int | None = None
    costs: StepCosts | None = None
    reads_families: bool = False

    def replica(self, name: str) -> Replica:
        """Return the engine on a GPU. Raises AparError if the model or a request does not fit."""
        is_gpu = name != CPU
        block_size = self.block_size or (_BLOCK_SIZE if is_gpu else _CPU_BLOCK_SIZE)
        costs, tokens, is_large = self.costs, self.kv_tokens, True
        if costs is None or tokens is None:
            if not is_gpu:
                raise SizingError("--gpu cpu needs --costs and --kv-tokens")
            gpu = find_gpu(name)
            name = gpu.name
            is_large = gpu.memory_bytes >= _LARGE_GPU_BYTES
            costs = costs or step_costs(self.size, gpu, self.tensor_parallel, block_size)
            tokens = tokens or kv_tokens(
                self.size, gpu, self.tensor_parallel, self.memory_share, block_size
            )
        if tokens < self.max_model_len:
            raise SizingError(
                f"the KV cache on {name} holds {tokens:,} tokens, but one request may need "
                f"{self.max_model_len:,}: vLLM would not start; use a smaller --max-model-len"
            )
        return Replica(
            hardware=name,
            num_gpus=self.tensor_parallel if is_gpu else 0,
            costs=costs,
            kv_tokens=tokens,
            config=self.size.config,
            max_model_len=self.max_model_len,
            max_step_tokens=_LARGE_STEP_TOKENS if is_large else _STEP_TOKENS,
            block_size=block_size,
            family=self._family(block_size) if self.reads_families else None,
        )

    def _family(self, block_size: int) -> FamilySettings:
        return FamilySettings.for_blocks(
            self.size.block_layer_bytes(block_size, self.tensor_parallel)
        )


def _show(made: Plan, size: ModelSize, served: Served, out: Path | None, *, as_json: bool) -> None:
    text, overlay = cluster_yaml(made, served), overlay_values(made, served)
    if out is not None:
        out.write_text(text, encoding="utf-8")
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
