"""`apar plan`: replicas, concurrency limits and KV cache for a load."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from apar_core.step_costs.gpus import GPUS, Gpu, find_gpu
from apar_core.step_costs.models import ModelSize, checked_dtype, find_model
from cluster.cli.options import (
    BLOCK_SIZE_HELP,
    DTYPE_HELP,
    MODEL_HELP,
    TRACE_HELP,
    AsJson,
    Duration,
    duration_option,
    wrong_value,
)
from cluster.cli.terminal import clear_errors
from cluster.config.model import DEFAULT_MODEL, ModelConfig
from cluster.monitor.sources import PagesSource
from cluster.sizing.deployment import Served, cluster_yaml, overlay_values
from cluster.sizing.errors import SizingError
from cluster.sizing.fork_profiles import PROFILES, find_profile
from cluster.sizing.measured_costs import fit_costs, step_points, watch
from cluster.sizing.memory import ReplicaMemory, cpu_memory, gpu_memory
from cluster.sizing.plan import Goals, Plan, make_plan
from cluster.sizing.reasons import Section, reasons
from cluster.sizing.request_shape import RequestShape, shape_of
from cluster.sizing.step_costs import APAR_TINY_CPU, StepCosts, roofline
from cluster.sizing.traces import read_trace

CPU = "cpu"
_DEFAULT_GPU = "a100-80g"
_MEASURE_INTERVAL_S = 2.0
_BLOCK_SIZE, _CPU_BLOCK_SIZE = 16, 32
_VALUE_WIDTH = 30

_LOAD, _GOALS, _MODEL = "Load", "Goals, met by 99% of the requests", "Model"
_GPU, _TIME, _OUTPUT = "GPU", "Step time", "Output"
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
    first_token: Annotated[
        float | None,
        duration_option(help="Time to the first token.", minimum="1us", panel=_GOALS),
    ] = None,
    token: Annotated[
        float | None,
        duration_option(help="Time per output token of a thread.", minimum="1us", panel=_GOALS),
    ] = None,
    latency: Annotated[
        float | None,
        duration_option(help="Time to the end of the answer.", minimum="1us", panel=_GOALS),
    ] = None,
    headroom: Annotated[
        float,
        typer.Option(
            min=0, help="Growth of the load to plan for, as a share of it.", rich_help_panel=_GOALS
        ),
    ] = 0.2,
    target_utilization: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=0.99,
            help="Share of a replica's maximum rate (with --users: of its places) to use.",
            rich_help_panel=_GOALS,
        ),
    ] = 0.8,
    spare: Annotated[
        int,
        typer.Option(
            min=0, help="Replicas that may be missing, as in a rollout.", rich_help_panel=_GOALS
        ),
    ] = 1,
    model: Annotated[str, typer.Option(help=MODEL_HELP, rich_help_panel=_MODEL)] = "apar-7b",
    parameters: Annotated[
        float | None,
        typer.Option(
            min=_POSITIVE,
            help="Parameters (billions). With --layers, --kv-heads and --head-dim, the model's "
            "configuration is not read.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the model.", rich_help_panel=_MODEL)
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="KV heads per layer.", rich_help_panel=_MODEL)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, help="Dimension of a head.", rich_help_panel=_MODEL)
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help=DTYPE_HELP,
            rich_help_panel=_MODEL,
        ),
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Context length to serve (tokens; default: the model's).",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(GPUS)}, another name with --gpu-memory-gib, --gpu-bandwidth-gb-s and "
            f"--gpu-tflops, or cpu (default: {_DEFAULT_GPU}; cpu for {DEFAULT_MODEL}).",
            rich_help_panel=_GPU,
        ),
    ] = None,
    gpu_memory_gib: Annotated[
        float | None,
        typer.Option(min=_POSITIVE, help="Memory per GPU (GiB).", rich_help_panel=_GPU),
    ] = None,
    gpu_bandwidth_gb_s: Annotated[
        float | None,
        typer.Option(min=_POSITIVE, help="Memory bandwidth per GPU (GB/s).", rich_help_panel=_GPU),
    ] = None,
    gpu_tflops: Annotated[
        float | None,
        typer.Option(
            min=_POSITIVE,
            help="Dense 16-bit throughput per GPU (TFLOP/s).",
            rich_help_panel=_GPU,
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            min=0.01, max=1, help="Share of a GPU's memory for vLLM.", rich_help_panel=_GPU
        ),
    ] = 0.9,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="GPUs per replica.", rich_help_panel=_GPU)
    ] = 1,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(
            min=_POSITIVE, help="With --gpu cpu: KV cache per replica (GiB).", rich_help_panel=_GPU
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"{BLOCK_SIZE_HELP} Default: 16, with cpu 32.", rich_help_panel=_GPU
        ),
    ] = None,
    step_time_base: Annotated[
        float | None,
        duration_option(help="Measured time of a step without threads.", panel=_TIME),
    ] = None,
    step_time_per_thread: Annotated[
        float | None,
        duration_option(help="Measured step time per thread, its attention included.", panel=_TIME),
    ] = None,
    step_time_per_prompt_token: Annotated[
        float, duration_option(help="Measured step time per prompt token.", panel=_TIME)
    ] = Duration.of("0s"),
    measure_from: Annotated[
        str | None,
        typer.Option(
            help="Measure step times on a running cluster with changing load: its metrics page.",
            rich_help_panel=_TIME,
        ),
    ] = None,
    measure_for: Annotated[
        float, duration_option(help="Duration of the measurement.", minimum="1s", panel=_TIME)
    ] = Duration.of("30s"),
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
    """Plan a cluster for a load: KV cache, concurrency limits, replicas, with the reasons.

    Ends with the YAML for [bold]apar serve --config[/bold] and the values of a Kubernetes overlay.
    --model also takes a config.json. Example:
    [bold]apar plan --rate 20 --model apar-7b --gpu a100-80g --token 50ms[/bold]
    """
    values = {name: each for name, each in context.params.items() if name not in ("out", "as_json")}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise wrong_value(f"--{name.replace('_', '-')}", f"{value} is not a finite number.")
    if (rate is None) == (users is None):
        raise typer.BadParameter("give either --rate or --users")
    if forks not in PROFILES:
        raise wrong_value("--forks", f"{forks!r} is not one of {', '.join(PROFILES)}")
    with clear_errors():
        _plan(PlanRequest.model_validate(values), out, as_json=as_json)


class PlanRequest(BaseModel):
    """The options of `apar plan`, and what follows from them: model, GPU, requests, step times."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rate: float | None
    users: int | None
    think_time: float
    prompt_tokens: float
    answer_tokens: float
    forks: str
    trace: Path | None
    first_token: float | None
    token: float | None
    latency: float | None
    headroom: float
    target_utilization: float
    spare: int
    model: str
    parameters: float | None
    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    dtype: str
    max_model_len: int | None
    gpu: str | None
    gpu_memory_gib: float | None
    gpu_bandwidth_gb_s: float | None
    gpu_tflops: float | None
    gpu_memory_utilization: float
    tensor_parallel: int
    kv_cache_gib: float | None
    block_size: int | None
    step_time_base: float | None
    step_time_per_thread: float | None
    step_time_per_prompt_token: float
    measure_from: str | None
    measure_for: float
    min_replicas: int | None

    @property
    def goals(self) -> Goals:
        """Load and goals."""
        return Goals(
            self.rate, self.users, self.think_time, self.first_token, self.token, self.latency,
            self.headroom, self.target_utilization, self.spare,
        )  # fmt: skip

    @property
    def gpu_used(self) -> Gpu | None:
        """The GPU, None on a CPU."""
        name = self.gpu or (CPU if self.model == DEFAULT_MODEL else _DEFAULT_GPU)
        if name == CPU:
            return None
        return find_gpu(name, self.gpu_memory_gib, self.gpu_bandwidth_gb_s, self.gpu_tflops)

    def size(self) -> ModelSize:
        """Return the model's dimensions, from the options or else from its configuration."""
        dtype = None if self.dtype == "auto" else self.dtype
        given = (self.parameters, self.layers, self.kv_heads, self.head_dim)
        parameters, layers, kv_heads, head_dim = given
        if None not in given:
            assert parameters is not None
            assert layers is not None
            assert kv_heads is not None
            assert head_dim is not None
            dtype = checked_dtype(dtype or "bfloat16")
            number = round(parameters * 1e9)
            return ModelSize(
                self.model, number, layers, kv_heads, head_dim, dtype, "given", self.max_model_len
            )
        if any(each is not None for each in given):
            raise SizingError("give all of --parameters, --layers, --kv-heads and --head-dim")
        return find_model(self.model, dtype)

    def shape(self, size: ModelSize) -> RequestShape:
        """Return the mean request. Raises SizingError if the context is too short for it."""
        if self.trace is not None:
            forking = self.forks != "none"
            shape = shape_of(read_trace(self.trace, forking=forking), str(self.trace))
        else:
            shape = find_profile(self.forks).shape(self.prompt_tokens, self.answer_tokens)
        longest = self.max_model_len or size.max_positions
        wanted = shape.prompt_tokens + shape.text_tokens
        if longest is not None and wanted > longest:
            raise SizingError(
                f"a mean request of {wanted:,.0f} tokens is longer than the context of {longest:,}"
            )
        return shape

    def memory(self, size: ModelSize) -> ReplicaMemory:
        """Return a replica's memory. Raises SizingError if the longest request does not fit."""
        gpu = self.gpu_used
        if gpu is None:
            memory = cpu_memory(size, self._kv_cache_gib, self.block_size or _CPU_BLOCK_SIZE)
        else:
            memory = gpu_memory(
                size, gpu.memory_gib, self.gpu_memory_utilization, self.tensor_parallel,
                self.block_size or _BLOCK_SIZE,
            )  # fmt: skip
        longest = self.max_model_len or size.max_positions
        if longest is not None and memory.tokens < longest:
            raise SizingError(
                f"the KV cache holds {memory.tokens:,} tokens, but one request may need "
                f"{longest:,}: vLLM would not start; use a smaller --max-model-len"
            )
        return memory

    def costs(self, size: ModelSize) -> StepCosts:
        """Return step times: given, measured, known for apar-tiny, or from a roofline."""
        base_s, thread_s = self.step_time_base, self.step_time_per_thread
        if base_s is not None and thread_s is not None:
            return StepCosts(base_s, thread_s, 0.0, self.step_time_per_prompt_token, "given")
        if self.measure_from is not None:
            source = PagesSource([self.measure_from])
            taken = watch(source, self.measure_for, _MEASURE_INTERVAL_S)
            return fit_costs(step_points(taken), base_s)
        if base_s is not None or thread_s is not None:
            raise SizingError(
                "give both --step-time-base and --step-time-per-thread, or the first and "
                "--measure-from"
            )
        gpu = self.gpu_used
        if gpu is not None:
            return roofline(size, gpu, self.tensor_parallel)
        if self.model == DEFAULT_MODEL:
            return APAR_TINY_CPU
        raise SizingError(
            "step times on this CPU are unknown: give --step-time-base and --step-time-per-thread, "
            "or --measure-from"
        )

    def served(self) -> Served:
        """Return the model as it appears in the configuration."""
        gpu = self.gpu_used
        return Served(
            checkpoint=self.model,
            tensor_parallel=self.tensor_parallel,
            gpu_utilisation=None if gpu is None else self.gpu_memory_utilization,
            kv_cache_gib=self._kv_cache_gib if gpu is None else None,
            max_model_len=self.max_model_len,
            min_replicas=self.min_replicas,
        )

    @property
    def _kv_cache_gib(self) -> float:
        default = ModelConfig(checkpoint=self.model).kv_cache_bytes / 2**30
        return self.kv_cache_gib or default


def _plan(request: PlanRequest, out: Path | None, *, as_json: bool) -> None:
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
    """Return the plan for JSON: its numbers, the reasons in words, and the settings."""
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
