"""One model of a cluster: its checkpoint, its replicas and their limits; models known by name."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from cluster.config.autoscaling import DEFAULT_TARGET_SHARE, AutoscalingConfig

DEFAULT_MODEL = "apar-tiny"
DEFAULT_MAX_CONCURRENCY = 64
# Beyond this a CUDA graph and the sampler's buffers cost more than the batch brings.
MAX_THREADS = 1024
# Engine arguments that a field of ours sets: the engine and the cluster must agree on them.
_SET_BY_FIELDS = {"model": "checkpoint", "served_model_name": "name"}
_MODELS = Path(__file__).resolve().parents[2] / "apar_core" / "models"


@dataclass(frozen=True, slots=True)
class Preset:
    """A model known by name: where it lies and the limits that suit it.

    Source of the concurrency caps of the large models: APAR (arXiv 2401.06761), 4.3.
    """

    path: str
    max_concurrency: int
    engine: dict[str, Any] = field(default_factory=dict)


PRESETS = {
    # Compiling takes longer than most of what one tries with this model.
    "apar-tiny": Preset(
        path=str(_MODELS / "apar_tiny"), max_concurrency=64, engine={"enforce_eager": True}
    ),
    "apar-7b": Preset(path="THUDM/apar-7b", max_concurrency=350, engine={"max_model_len": 2048}),
    "apar-13b": Preset(path="THUDM/apar-13b", max_concurrency=180, engine={"max_model_len": 2048}),
}


class ForkLimits(BaseModel):
    """Whether a model's requests fork, and how far; the engine's own defaults where absent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool | None = Field(
        None, description="Whether requests fork unless they say otherwise; true when absent."
    )
    max_threads: PositiveInt | None = Field(
        None, description="Threads of one request alive at once; 32 when absent."
    )
    max_forks: PositiveInt | None = Field(
        None, description="Forks of one request in all; 512 when absent."
    )
    max_replica_threads: PositiveInt | None = Field(
        None,
        description="Threads of all requests alive at once in a replica, beyond which a fork "
        "waits; absent, vLLM's `max_num_seqs` alone bounds what runs.",
    )
    policy: Literal["eager", "adaptive"] | None = Field(
        None,
        description="When a fork within these limits starts. `eager`: at once. `adaptive`: while "
        "the predicted engine step leaves running requests their `token_time_ms`. Eager when "
        "absent.",
    )
    token_time_ms: PositiveFloat | None = Field(
        None,
        description="Time per output token, in ms, that the adaptive policy keeps to; 50 when "
        "absent.",
    )

    @model_validator(mode="after")
    def _check_token_time(self) -> Self:
        if self.token_time_ms is not None and self.policy != "adaptive":
            raise ValueError("token_time_ms: has no effect without `policy: adaptive`")
        return self


class ModelConfig(BaseModel):
    """A model, the engines that serve it, and their limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str = Field(
        DEFAULT_MODEL, min_length=1, description="Preset, checkpoint folder or hub name."
    )
    name: str | None = Field(
        None, min_length=1, description="Name that clients send; the preset's or the folder's name."
    )
    replicas: PositiveInt = Field(1, description="Engines that serve this model.")
    autoscaling: AutoscalingConfig | None = Field(
        None, description="Bounds and targets between which `replicas` follow the load instead."
    )
    gpus_per_replica: PositiveInt = Field(
        1, description="GPUs of one engine, over which its tensors are split; unused on CPU."
    )
    gpu_memory_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of a GPU's memory that an engine may use, weights and KV cache "
        "together; engines whose shares fit share a GPU. vLLM's default when absent.",
    )
    max_concurrency: PositiveInt | None = Field(
        None, description="Requests that one replica runs at once; from the preset when absent."
    )
    max_queued_requests: NonNegativeInt = Field(
        512, description="Requests that wait for a replica; one more gets a 503."
    )
    max_queue_s: PositiveFloat = Field(
        60.0, description="Time that a request waits for a replica at most; then it gets a 503."
    )
    threads_per_request: PositiveFloat = Field(
        4.0, ge=1, description="Threads that a request has on average, for sizing the engine."
    )
    forks: ForkLimits = Field(ForkLimits(), description="Limits on the threads of one request.")
    kv_cache_gib: PositiveFloat | None = Field(
        None, description="KV cache of a replica on CPU, in GiB; 0.25 for apar-tiny, else 4."
    )
    cpu_threads: PositiveInt | None = Field(
        None,
        description="Executors of a replica's matrix kernels on CPU; an even share of the cores.",
    )
    coalesce_s: NonNegativeFloat = Field(
        0.05,
        le=1,
        description="Time within which tokens of a stream are sent on together; up to four times "
        "as long with many streams; 0 sends each at once.",
    )
    replay: bool = Field(
        False,
        description="Whether requests may name the tokens of their answer, in `apar.replay`: for "
        "load tests with recorded answers, also with `engine: {load_format: dummy}`.",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict, description="vLLM engine arguments, by their Python names."
    )

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            raise ValueError("replicas: leave it out beside `autoscaling`")
        return self

    @model_validator(mode="after")
    def _check_replay(self) -> Self:
        if self.replay and self.engine.get("speculative_config"):
            raise ValueError("replay: impossible beside `engine.speculative_config` in vLLM")
        return self

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, engine: dict[str, Any]) -> dict[str, Any]:
        for argument, name in _SET_BY_FIELDS.items():
            if argument in engine:
                raise ValueError(f"{argument}: set the model's `{name}` instead")
        additional = engine.get("additional_config", {})
        if not isinstance(additional, dict):
            raise ValueError("additional_config: a mapping is expected")
        if "apar" in additional:
            raise ValueError("additional_config.apar: set the model's `forks` instead")
        return engine

    @property
    def preset(self) -> Preset:
        """The named preset, or one for a checkpoint that has none."""
        given = self.checkpoint
        path = str(Path(given).expanduser()) if given.startswith("~") else given
        return PRESETS.get(given) or Preset(path, DEFAULT_MAX_CONCURRENCY)

    @property
    def public_name(self) -> str:
        """The `model` that clients send."""
        if self.name is not None or self.checkpoint in PRESETS:
            return self.name or self.checkpoint
        path = Path(self.preset.path)
        return path.resolve().name if path.exists() else self.checkpoint

    @property
    def deployment_name(self) -> str:
        """The name of this model's replicas in Ray Serve."""
        return "Replica-" + re.sub(r"[^A-Za-z0-9._-]", "-", self.public_name)

    @property
    def max_replicas(self) -> int:
        """Most engines that serve this model at a time."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def min_replicas(self) -> int:
        """Fewest engines that serve this model at a time."""
        return self.replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def target_threads(self) -> float:
        """Threads that the autoscaler wants a replica to carry."""
        given = None if self.autoscaling is None else self.autoscaling.target_threads
        return given or DEFAULT_TARGET_SHARE * self.threads_per_replica

    @property
    def requests_per_replica(self) -> int:
        """The concurrency cap of one replica, in requests."""
        return self.max_concurrency or self.preset.max_concurrency

    @property
    def threads_per_replica(self) -> int:
        """vLLM's `max_num_seqs`: threads, sized from the cap on requests.

        Never fewer than the requests, or admitted requests would wait for each other's roots.
        """
        wanted = math.ceil(self.requests_per_replica * self.threads_per_request)
        return max(self.requests_per_replica, min(wanted, MAX_THREADS))

    @property
    def kv_cache_bytes(self) -> int:
        """KV cache of one replica on CPU."""
        default_gib = 0.25 if self.checkpoint == DEFAULT_MODEL else 4.0
        return int((self.kv_cache_gib or default_gib) * 2**30)

    @property
    def gpus_in_ray(self) -> float:
        """GPUs that Ray sets aside for one replica; a share lets several use one GPU."""
        if self.gpus_per_replica == 1 and self.gpu_memory_share is not None:
            return self.gpu_memory_share
        return float(self.gpus_per_replica)
