"""What `apar plan` was asked for, and its parts found: model, machine, requests, step times."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from cluster.config.model import DEFAULT_MODEL, ModelConfig
from cluster.monitor.sources import PagesSource
from cluster.sizing.deployment import Served
from cluster.sizing.errors import SizingError
from cluster.sizing.fork_profiles import find_profile
from cluster.sizing.gpus import Gpu, find_gpu
from cluster.sizing.measured_costs import fit_costs, step_points, watch
from cluster.sizing.memory import ReplicaMemory, cpu_memory, gpu_memory
from cluster.sizing.model_size import ModelSize, checked_dtype, find_model
from cluster.sizing.plan import Goals
from cluster.sizing.request_shape import RequestShape, shape_of
from cluster.sizing.step_costs import APAR_TINY_CPU, StepCosts, roofline
from cluster.sizing.traces import read_trace

CPU = "cpu"
_DEFAULT_GPU = "a100-80g"
_MEASURE_INTERVAL_S = 2.0
_BLOCK_SIZE, _CPU_BLOCK_SIZE = 16, 32


class PlanRequest(BaseModel):
    """The options of the command, by their names; `plan_options` describes them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rate: float | None
    users: int | None
    think_time_s: float
    prompt_tokens: float
    answer_tokens: float
    forks: str
    trace: Path | None
    first_token_s: float | None
    token_ms: float | None
    latency_s: float | None
    headroom: float
    target_utilization: float
    spare: int
    model: str
    parameters: float | None
    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    dtype: str | None
    max_model_len: int | None
    gpu: str | None
    gpu_memory_gib: float | None
    gpu_bandwidth_gb_s: float | None
    gpu_tflops: float | None
    gpu_memory_utilization: float
    tensor_parallel: int
    kv_cache_gib: float | None
    block_size: int | None
    step_time_base_ms: float | None
    step_time_per_thread_ms: float | None
    step_time_per_prompt_token_us: float
    measure_from: str | None
    measure_s: float
    min_replicas: int | None

    @property
    def goals(self) -> Goals:
        """Load and goals."""
        token_s = None if self.token_ms is None else self.token_ms / 1000
        return Goals(
            self.rate, self.users, self.think_time_s, self.first_token_s, token_s, self.latency_s,
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
        """The model by its dimensions, where all are given, else by its configuration."""
        given = (self.parameters, self.layers, self.kv_heads, self.head_dim)
        parameters, layers, kv_heads, head_dim = given
        if None not in given:
            assert parameters is not None
            assert layers is not None
            assert kv_heads is not None
            assert head_dim is not None
            dtype = checked_dtype(self.dtype or "bfloat16")
            number = round(parameters * 1e9)
            return ModelSize(
                self.model, number, layers, kv_heads, head_dim, dtype, "given", self.max_model_len
            )
        if any(each is not None for each in given):
            raise SizingError("give all of --parameters, --layers, --kv-heads and --head-dim")
        return find_model(self.model, self.dtype)

    def shape(self, size: ModelSize) -> RequestShape:
        """The mean request. Raises SizingError where the model's context is too short for it."""
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
        """The memory of a replica. Raises SizingError where the longest request does not fit."""
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
                f"the KV cache holds {memory.tokens:,} tokens, and one request may need {longest:,}"
                ": vLLM would not start; take a smaller --max-model-len"
            )
        return memory

    def costs(self, size: ModelSize) -> StepCosts:
        """Step times: given, else measured, else known, else of a roofline."""
        base_ms, thread_ms = self.step_time_base_ms, self.step_time_per_thread_ms
        base_s = None if base_ms is None else base_ms / 1000
        if base_s is not None and thread_ms is not None:
            prefill_s = self.step_time_per_prompt_token_us / 1e6
            return StepCosts(base_s, thread_ms / 1000, 0.0, prefill_s, "given")
        if self.measure_from is not None:
            source = PagesSource([self.measure_from])
            taken = watch(source, self.measure_s, _MEASURE_INTERVAL_S)
            return fit_costs(step_points(taken), base_s)
        if base_s is not None or thread_ms is not None:
            raise SizingError(
                "give both --step-time-base-ms and --step-time-per-thread-ms, or the first and "
                "--measure-from"
            )
        gpu = self.gpu_used
        if gpu is not None:
            return roofline(size, gpu, self.tensor_parallel)
        if self.model == DEFAULT_MODEL:
            return APAR_TINY_CPU
        raise SizingError(
            "nothing is known of step times on this CPU: give --step-time-base-ms and "
            "--step-time-per-thread-ms, or --measure-from"
        )

    def served(self) -> Served:
        """The model as the configuration will name it."""
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
