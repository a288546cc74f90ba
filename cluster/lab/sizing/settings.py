"""Settings of `apar plan`, which are also its options."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from apar_core.attention.settings import FamilySettings
from apar_core.step_costs.files import read_costs
from apar_core.step_costs.gpus import GPUS, find_gpu
from apar_core.step_costs.models import ModelSize, find_model
from apar_core.step_costs.predict import kv_tokens, step_costs
from apar_core.suggestions import did_you_mean
from cluster.lab.experiments.parts import StartStage
from cluster.lab.settings import Settings
from cluster.lab.sizing.errors import SizingError
from cluster.lab.sizing.plan import Load, Plan, make_plan
from cluster.lab.sizing.replica_run import Slos
from cluster.lab.sizing.requests import PROFILES, Workload
from cluster.lab.sizing.search import Replica, Runner, SearchConditions
from deployments.config.model import PRESETS

CPU = "cpu"
# vLLM's default tokens per step for its server (0.32, engine/arg_utils.py).
_LARGE_GPU_BYTES = 70 * 2**30
_STEP_TOKENS, _LARGE_STEP_TOKENS = 2048, 8192
_BLOCK_SIZE, _CPU_BLOCK_SIZE = 16, 32
_CONTEXT = 4096
_SHORTEST_S = 1e-6


class PlanSettings(Settings):
    """Everything that a plan depends on."""

    rate: PositiveFloat | None = None
    """Requests per second."""
    users: PositiveInt | None = None
    """Instead of --rate: users who send their next request after the answer."""
    think_time_s: NonNegativeFloat = 0.0
    """With --users: time between an answer and the next request."""
    prompt_tokens: float = Field(140, ge=1)
    """Mean length of a prompt (tokens)."""
    answer_tokens: float = Field(300, ge=1)
    """Mean length of an answer (tokens)."""
    forks: str = Field("mixed", description=f"How answers fork: {', '.join(PROFILES)}.")
    trace: Path | None = None
    """Recorded answers: JSON lines with `prompt` and `response`. Replaces the lengths and --forks.
    """
    arrivals: Path | None = None
    """Recorded arrival times, scaled to each rate: CSV with TIMESTAMP, or seconds (default: Poisson
    arrivals).
    """
    first_token_s: float = Field(2.0, ge=_SHORTEST_S)
    """Time to the first token."""
    token_s: float | None = Field(None, ge=_SHORTEST_S)
    """Time per token after the first, on the critical path of the answer."""
    latency_s: float | None = Field(None, ge=_SHORTEST_S)
    """Time to the end of the answer."""
    headroom: float = Field(0.2, ge=0)
    """Growth of the load to plan for, as a share of it."""
    spare: NonNegativeInt = 1
    """Replicas that may be missing, as in a rollout."""
    model: str = Field(
        "apar-7b",
        description=f"Preset ({', '.join(PRESETS)}), checkpoint folder or Hugging Face name. Or "
        "llama-7b, llama-13b, llama-3-8b, llama-3-70b or a config.json.",
        examples=list(PRESETS),
    )
    dtype: str = "auto"
    """Data type of the weights, such as float32 or bfloat16, or auto."""
    max_model_len: int | None = Field(None, ge=16)
    """Context length to serve (tokens; default: the model's)."""
    gpu: tuple[str, ...] = Field(
        ("a100-80gb",),
        description=f"GPUs to compare: {', '.join(GPUS)}. Another name, or cpu, needs --costs and "
        "--kv-tokens.",
    )
    tensor_parallel: PositiveInt = 1
    """GPUs per replica."""
    gpu_memory_utilization: float = Field(0.9, ge=0.01, le=1)
    """Share of a GPU's memory for vLLM."""
    prices: tuple[NonNegativeFloat, ...] = ()
    """Price per GPU and hour, one for each --gpu. The recommendation is then the cheapest, not the
    one with the fewest GPUs.
    """
    costs: Path | None = None
    """Step costs as `apar experiment calibrate` writes them; replaces the tables."""
    kv_tokens: int | None = Field(None, ge=16)
    """Tokens of KV cache per replica, as vLLM prints at its start (default: computed from the
    memory).
    """
    block_size: PositiveInt | None = None
    """Tokens per KV-cache block. Default: 16, with cpu 32."""
    attention: Literal["ordinary", "family"] = "ordinary"
    """ordinary, or family: threads of a request read shared KV blocks once."""
    caps: tuple[PositiveInt, ...] = ()
    """Limits on concurrent requests to try (default: the largest that keeps --token and fits into
    the KV cache, and 60% of it).
    """
    requests: int = Field(400, ge=100)
    """Requests measured in a run of the search; the last run has 2.5 times as many."""
    seed: NonNegativeInt = 0
    """Random seed."""
    min_replicas: PositiveInt | None = None
    """Configure autoscaling down to this number of replicas."""

    @field_validator("forks")
    @classmethod
    def _check_forks(cls, name: str) -> str:
        if name not in PROFILES:
            known = f"{', '.join(PROFILES)}{did_you_mean(name, PROFILES)}"
            raise ValueError(f"{name!r} is not one of {known}")
        return name

    @field_validator("costs", "kv_tokens")
    @classmethod
    def _check_one_gpu(cls, value: Path | int | None, info: ValidationInfo) -> Path | int | None:
        if value is not None and len(info.data.get("gpu", ())) > 1:
            raise ValueError(f"is for one GPU, and --gpu names {len(info.data['gpu'])}")
        return value

    @field_validator("prices")
    @classmethod
    def _check_prices(cls, prices: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        gpus = info.data.get("gpu", ())
        if prices and len(prices) != len(gpus):
            raise ValueError(f"has {len(prices)} prices for {len(gpus)} GPUs")
        return prices

    @model_validator(mode="after")
    def _check_load(self) -> Self:
        if (self.rate is None) == (self.users is None):
            raise ValueError("give either --rate or --users")
        return self

    @cached_property
    def size(self) -> ModelSize:
        """The model's dimensions. Raises StepCostsError for an unknown model."""
        return find_model(self.model, None if self.dtype == "auto" else self.dtype)

    @property
    def context_tokens(self) -> int:
        """Context length of the engines."""
        return self.max_model_len or self.size.max_positions or _CONTEXT

    @property
    def memory_share(self) -> float | None:
        """Share of a GPU's memory for vLLM; None on a CPU."""
        return None if CPU in self.gpu else self.gpu_memory_utilization

    def answer(self, processes: int, start_stage: StartStage) -> Plan:
        """Make the plan. Raises AparError if there is none, or the model or a request does not fit.

        The plan does not depend on the number of processes.
        """
        conditions = SearchConditions(
            Workload(self.trace, self.forks, self.prompt_tokens, self.answer_tokens),
            Slos(self.first_token_s, self.token_s, self.latency_s),
            self.context_tokens,
            self.arrivals,
            self.requests,
            self.seed,
        )
        return make_plan(
            Load(self.rate, self.users, self.think_time_s, self.headroom, self.spare),
            Runner(list(map(self.replica, self.gpu)), conditions),
            caps=self.caps,
            prices=self.prices,
            start_stage=start_stage,
            processes=processes,
        )

    def replica(self, name: str) -> Replica:
        """Return the engine on a GPU. Raises AparError if the model or a request does not fit."""
        is_gpu, parallel = name != CPU, self.tensor_parallel
        block_size = self.block_size or (_BLOCK_SIZE if is_gpu else _CPU_BLOCK_SIZE)
        costs = None if self.costs is None else read_costs(self.costs)
        tokens, is_large = self.kv_tokens, True
        if costs is None or tokens is None:
            if not is_gpu:
                raise SizingError("--gpu cpu needs --costs and --kv-tokens")
            gpu = find_gpu(name)
            name = gpu.name
            is_large = gpu.memory_bytes >= _LARGE_GPU_BYTES
            costs = costs or step_costs(self.size, gpu, parallel, block_size)
            share = self.gpu_memory_utilization
            tokens = tokens or kv_tokens(self.size, gpu, parallel, share, block_size)
        if tokens < self.context_tokens:
            raise SizingError(
                f"the KV cache on {name} holds {tokens:,} tokens, but one request may need "
                f"{self.context_tokens:,}: vLLM would not start; use a smaller --max-model-len"
            )
        block_bytes = self.size.block_layer_bytes(block_size, parallel)
        return Replica(
            hardware=name,
            num_gpus=parallel if is_gpu else 0,
            costs=costs,
            kv_tokens=tokens,
            config=self.size.config,
            max_model_len=self.context_tokens,
            max_step_tokens=_LARGE_STEP_TOKENS if is_large else _STEP_TOKENS,
            block_size=block_size,
            family=FamilySettings.for_blocks(block_bytes) if self.attention == "family" else None,
        )
