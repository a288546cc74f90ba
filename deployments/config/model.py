"""A model of a cluster: its checkpoint, replicas and limits; and the presets."""

import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

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

from apar_core.checkpoint_folder import adapter_in
from apar_core.formats.resolved_format import FormatSetting
from apar_core.models.guesses import SHIPPED_PROMPTS
from apar_core.models.smollm2 import APAR_SMOLLM2, SMOLLM2, CachedModel
from deployments.config.autoscaling import DEFAULT_TARGET_SHARE, AutoscalingConfig
from deployments.config.checkpoint_files import (
    check_adapter_folder,
    check_checkpoint_folder,
    check_name,
)
from deployments.config.files import ConfigError
from deployments.config.tool_calls import CALL_STARTS

DEFAULT_MODEL = "apar-tiny"
DEFAULT_MAX_CONCURRENCY = 64
NO_ADAPTER = "none"
# Above this, CUDA graphs and the sampler's buffers cost more than the larger batch gains.
MAX_THREADS = 1024
# Engine arguments that have fields of their own, because the cluster needs them too.
_SET_BY_FIELDS = {"model": "checkpoint", "served_model_name": "name", "lora_modules": "adapters"}
# Engine arguments for engines over several nodes; Ray takes all GPUs of a replica from one.
_OVER_NODES = (
    "data_parallel_address",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
    "data_parallel_rank",
    "data_parallel_size_local",
    "data_parallel_start_rank",
    "nnodes",
    "node_rank",
)
# Their product is the number of a replica's GPUs.
_PARALLEL_SIZES = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
)
_TENSOR_PARALLEL_SIZE = "tensor_parallel_size"
_PROPOSER = "apar_core.engine.prompt_chain.PromptChain"
_MODELS = Path(__file__).resolve().parents[2] / "apar_core" / "models"


@dataclass(frozen=True, slots=True)
class Preset:
    """A model known by name: its checkpoint and the settings that suit it.

    `cpu_threads` is None for an equal share of the cores. `is_small`: takes float32 on CPUs that
    are slow with bfloat16, little KV cache for a single answer, and is not compiled on CPUs.

    Source of the large models' concurrency limits: APAR (arXiv 2401.06761), section 4.3.
    """

    checkpoint: str | CachedModel
    max_concurrency: int
    engine: dict[str, Any] = field(default_factory=dict)
    kv_cache_gib: float = 4.0
    cpu_threads: int | None = None
    is_small: bool = False

    @property
    def path(self) -> str:
        """The folder of the checkpoint, or its name on the Hugging Face hub."""
        if isinstance(self.checkpoint, CachedModel):
            return str(self.checkpoint.folder)
        return self.checkpoint

    def check_fetched(self) -> None:
        """Raise ConfigError if the model is one of `apar fetch` and was not fetched yet."""
        if isinstance(self.checkpoint, CachedModel) and not self.checkpoint.folder.is_dir():
            raise ConfigError(
                f"{self.checkpoint.name} is not on this machine yet ({self.path}); run `apar fetch`"
            )


# The released checkpoints are fine-tuned Vicuna models. Checkpoints of that time have no template.
_VICUNA = {
    "max_model_len": 2048,
    "chat_template": str(_MODELS.parent / "offline" / "training" / "vicuna_template.jinja"),
}


def _embedded(folder: str) -> Preset:
    return Preset(
        str(_MODELS / folder),
        max_concurrency=64,
        # Compiling would take longer than most trials with these models.
        engine={"enforce_eager": True},
        kv_cache_gib=0.25,
        # A second thread gains a model this small nothing, and whenever another program takes its
        # core, the first one waits for it (docs/raw/2026-11-23-cpu-threads.txt).
        cpu_threads=1,
        is_small=True,
    )


def _smollm2(model: CachedModel) -> Preset:
    # 23 kB of KV cache a token.
    return Preset(model, max_concurrency=64, kv_cache_gib=1.0, is_small=True)


PRESETS = {
    "apar-tiny": _embedded("apar_tiny"),
    "apar-tiny-threadweaver": _embedded("apar_tiny_threadweaver"),
    APAR_SMOLLM2.name: _smollm2(APAR_SMOLLM2),
    SMOLLM2.name: _smollm2(SMOLLM2),
    "apar-7b": Preset("THUDM/apar-7b", max_concurrency=350, engine=_VICUNA),
    "apar-13b": Preset("THUDM/apar-13b", max_concurrency=180, engine=_VICUNA),
}


def multiplies_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether PyTorch has fast matrix products of bfloat16 on this CPU.

    They need AVX-512, or `bf16` on Arm. Elsewhere PyTorch computes one dot product after the other,
    so that a step takes longer with each row. Unknown CPUs count as fast.
    """
    with suppress(OSError):
        for line in cpu_info.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return not {"avx512bw", "avx_ne_convert", "bf16"}.isdisjoint(value.split())
    return True


def preset_of(name: str) -> Preset:
    """Return the named preset, or a default one for a folder or Hugging Face name."""
    path = str(Path(name).expanduser()) if name.startswith("~") else name
    return PRESETS.get(name) or Preset(path, DEFAULT_MAX_CONCURRENCY)


def served_by_default() -> str:
    """Return what `apar serve` serves if nothing is named: a real model, once it is fetched."""
    return APAR_SMOLLM2.name if APAR_SMOLLM2.folder.is_dir() else DEFAULT_MODEL


def model_path(name: str) -> str:
    """Return the checkpoint of a preset; folders and Hugging Face names are their own.

    Raises ConfigError for a misspelt preset, a missing folder and a checkpoint that must be
    fetched first.
    """
    check_name(name, list(PRESETS))
    preset = preset_of(name)
    preset.check_fetched()
    return preset.path


class ForkLimits(BaseModel):
    """Limits on forking; unset fields use the engine's defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool | None = Field(
        None, description="Whether requests fork unless they say otherwise; by default true."
    )
    max_threads: PositiveInt | None = Field(
        None, description="Limit on the live threads of a request; by default 32."
    )
    max_forks: PositiveInt | None = Field(
        None, description="Limit on the total forks of a request; by default 512."
    )
    max_replica_threads: PositiveInt | None = Field(
        None,
        description="Limit on the live threads of a replica; further forks wait. By default only "
        "vLLM's `max_num_seqs` limits the running threads.",
    )
    policy: Literal["eager", "adaptive"] | None = Field(
        None,
        description="When a fork within the limits starts. `eager` (default): at once. `adaptive`: "
        "steps keep to `token_time_ms` as predicted. Forks wait and threads rest, except for the "
        "thread that the reader waits for, and prompts are computed in smaller chunks.",
    )
    token_time_ms: PositiveFloat | None = Field(
        None,
        description="Time per output token that the adaptive policy keeps to (ms); by default 50.",
    )
    first_token_ms: PositiveFloat | None = Field(
        None,
        description="Time to first token that the adaptive policy may use for smaller chunks of "
        "the prompt (ms); by default 1000.",
    )
    step_costs: str | None = Field(
        None,
        min_length=1,
        description="File of step costs (`apar experiment calibrate`) from which the adaptive "
        "policy starts. By default it is eager for the first steps.",
    )
    growth_reserve_tokens: NonNegativeInt | None = Field(
        None,
        description="KV cache kept free for each running thread when a waiting request starts "
        "(tokens); by default 8. Without it, threads that grow preempt each other and are "
        "computed again. 0: as in vLLM.",
    )

    tool_call_starts: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        None,
        description="Tokens with which a tool call begins, such as <tool_call>. Answers to "
        "requests with tools fork until one of them; if empty, they do not fork. By default those "
        "of `engine.tool_call_parser`.",
    )

    @model_validator(mode="after")
    def _check_policy(self) -> Self:
        for name in ("token_time_ms", "first_token_ms", "step_costs"):
            if getattr(self, name) is not None and self.policy != "adaptive":
                raise ValueError(f"{name}: has no effect without `policy: adaptive`")
        return self


class FamilyLimits(BaseModel):
    """Least that threads must share to be read together; unset fields use the engine's defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_rows: int | None = Field(None, ge=2, description="Threads of a family; by default 2.")
    min_prefix_blocks: PositiveInt | None = Field(
        None, description="Full KV blocks that all threads of a family begin with; by default 4."
    )
    min_saved_blocks: NonNegativeInt | None = Field(
        None,
        description="Block reads that all families of a step save together; by default as many "
        "as have 64 MiB in one layer on one GPU, and 0 on CPUs.",
    )


class AdapterConfig(BaseModel):
    """A LoRA adapter, served under a name of its own by the replicas of its base model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, description="Name of the adapter in the API.")
    path: str = Field(min_length=1, description="Folder of the adapter, or Hugging Face name.")
    forks: bool | None = Field(
        None,
        description="Whether requests to the adapter fork unless they say otherwise; by default "
        "as `forks.enabled` of the model.",
    )

    @property
    def folder(self) -> str:
        """The path with the user's home folder written out."""
        return str(Path(self.path).expanduser()) if self.path.startswith("~") else self.path


class PromptChainConfig(BaseModel):
    """Speculation with a chain of prompt tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_tokens: str = Field(
        min_length=1,
        description="Folder of prompt tokens (`apar train-prompts`), or a preset that has its own "
        f"({', '.join(SHIPPED_PROMPTS)}).",
    )
    num_speculative_tokens: int = Field(
        3,
        ge=2,
        description="Guesses and prompt tokens in a thread's draft, at most twice the number of "
        "trained prompt tokens. Up to that number, all decoding steps have one width, as full CUDA "
        "graphs need.",
    )

    @property
    def path(self) -> str:
        """The folder of the prompt tokens."""
        shipped = SHIPPED_PROMPTS.get(self.prompt_tokens)
        return str(shipped or Path(self.prompt_tokens).expanduser().resolve())

    @property
    def speculative_config(self) -> dict[str, Any]:
        """vLLM's argument of that name."""
        return {
            "method": "custom_class",
            "model": _PROPOSER,
            "num_speculative_tokens": self.num_speculative_tokens,
        }


class ModelConfig(BaseModel):
    """A model, its replicas, and their limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description=f"Preset ({', '.join(PRESETS)}), checkpoint folder or Hugging Face name.",
    )
    name: str | None = Field(
        None,
        min_length=1,
        description="Name of the model in the API; by default the preset's or the folder's.",
    )
    adapters: tuple[AdapterConfig, ...] = Field(
        (),
        description="LoRA adapters that the replicas serve beside the model, without merging.",
    )
    fork_adapter: str | None = Field(
        None,
        min_length=1,
        description="Folder of a LoRA adapter. Requests to the model that may fork are answered "
        "with it, all others by the base model alone. By default the folder `adapter` in that of "
        "the checkpoint, if there is one that `adapters` does not name; `none` for no adapter.",
    )
    replicas: PositiveInt = Field(
        1, description="Number of replicas, each with an engine of its own."
    )
    autoscaling: AutoscalingConfig | None = Field(
        None,
        description="Bounds and targets for a number of replicas that follows the load; replaces "
        "`replicas`.",
    )
    gpus_per_replica: PositiveInt | None = Field(
        None,
        description="GPUs per replica; by default as many as the parallel sizes under `engine` "
        "need, which is 1 without any. They split the model's tensors, within each stage and rank "
        "of other parallel sizes. Ignored on CPU.",
    )
    gpu_memory_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of a GPU's memory for a replica's weights and KV cache. Replicas whose "
        "shares fit together use the same GPU. By default vLLM's.",
    )
    max_concurrency: PositiveInt | None = Field(
        None,
        description="Limit on the running requests of a replica; by default the preset's, else 64. "
        "A request counts once for each of its sequences, its answers times its prompts. One of "
        "more sequences than the limit gets a 400.",
    )
    max_queued_requests: NonNegativeInt = Field(
        512, description="Limit on the requests that wait for a replica; one more gets a 503."
    )
    max_queue_s: PositiveFloat = Field(
        60.0,
        description="Limit on the time that a request waits for a replica (seconds); after it the "
        "request gets a 503.",
    )
    threads_per_request: PositiveFloat = Field(
        4.0, ge=1, description="Expected mean threads per request, for sizing the engine."
    )
    forks: ForkLimits = Field(ForkLimits(), description="Limits on forking.")
    kv_cache_gib: PositiveFloat | None = Field(
        None,
        description="KV cache of a replica on CPU (GiB); by default 0.25 for apar-tiny and "
        "apar-tiny-threadweaver, 1 for smollm2-135m, else 4.",
    )
    cpu_threads: PositiveInt | None = Field(
        None,
        description="CPU threads per replica; by default 1 for apar-tiny and "
        "apar-tiny-threadweaver, else an equal share of the cores.",
    )
    coalesce_s: NonNegativeFloat = Field(
        0.05,
        le=1,
        description="Interval at which tokens of a request leave the engine, and those of a stream "
        "are sent, together (seconds); twice as long from 16 requests of a replica on. The longest "
        "pause is this and a step. 0 sends each token at once.",
    )
    replay: bool = Field(
        False,
        description="Whether requests may give the tokens of their answer in `apar.replay`: for "
        "load tests with recorded answers, also with `engine: {load_format: dummy}`.",
    )
    parallel_format: FormatSetting | None = Field(
        None,
        description="How the checkpoint marks text that may be written at the same time: the name "
        "of a format, or its fields, or `like: NAME` with the fields that differ. By default "
        "recognised by the checkpoint's tokens. See [Formats](formats.md).",
    )
    prompt_chain: PromptChainConfig | None = Field(
        None,
        description="Guess tokens ahead with a chain of prompt tokens (Parallel Prompt Decoding). "
        "Needs vLLM's V1 model runner, which vLLM has deprecated.",
    )
    attention: Literal["ordinary", "family"] = Field(
        "ordinary",
        description="How a decoding step reads the KV cache. `ordinary`: as vLLM does, each thread "
        "its blocks. `family`: blocks that threads share once. See "
        "[Family attention](family-attention.md).",
    )
    family: FamilyLimits = Field(
        FamilyLimits(), description="Least that threads must share with `attention: family`."
    )
    engine: dict[str, Any] = Field(
        default_factory=dict, description="Further vLLM engine arguments, by their Python names."
    )

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            raise ValueError("replicas: not allowed with `autoscaling`")
        return self

    @model_validator(mode="after")
    def _check_replay(self) -> Self:
        for name, is_used in (
            ("prompt_chain", self.prompt_chain is not None),
            ("engine.speculative_config", bool(self.engine.get("speculative_config"))),
        ):
            if self.replay and is_used:
                raise ValueError(f"replay: not possible with `{name}`")
        return self

    @model_validator(mode="after")
    def _check_family(self) -> Self:
        if self.family != FamilyLimits() and self.attention != "family":
            raise ValueError("family: has no effect without `attention: family`")
        return self

    @model_validator(mode="after")
    def _check_prompt_chain(self) -> Self:
        if self.prompt_chain is not None and self.engine.get("speculative_config"):
            raise ValueError("prompt_chain: not possible with `engine.speculative_config`")
        return self

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, engine: dict[str, Any]) -> dict[str, Any]:
        for argument, name in _SET_BY_FIELDS.items():
            if argument in engine:
                raise ValueError(f"{argument}: set the model's `{name}` instead")
        for argument in _OVER_NODES:
            if argument in engine:
                raise ValueError(f"{argument}: all processes of a replica are on one node")
        additional = engine.get("additional_config", {})
        if not isinstance(additional, dict):
            raise ValueError("additional_config: a mapping is expected")
        if "apar" in additional:
            raise ValueError("additional_config.apar: set the model's `forks` instead")
        return engine

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        sizes = {
            name: self.engine[name]
            for name in (_TENSOR_PARALLEL_SIZE, *_PARALLEL_SIZES)
            if name in self.engine
        }
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"engine.{name}: a positive integer is expected (got {size!r})")
        num_gpus, wanted = self.gpus_per_replica, math.prod(sizes.values())
        if num_gpus is None or num_gpus == wanted:
            return self
        # Tensor parallelism takes what the other sizes leave.
        if num_gpus % wanted or _TENSOR_PARALLEL_SIZE in sizes:
            given = " x ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(f"gpus_per_replica: {num_gpus} GPUs cannot be split into {given}")
        return self

    @property
    def tool_call_starts(self) -> tuple[str, ...]:
        """Tokens with which a tool call begins; empty if requests with tools do not fork."""
        if self.forks.tool_call_starts is not None:
            return self.forks.tool_call_starts
        engine = self.preset.engine | self.engine
        if engine.get("speculative_config") or self.prompt_chain is not None:
            return ()
        return CALL_STARTS.get(engine.get("tool_call_parser", ""), ())

    @property
    def num_gpus(self) -> int:
        """GPUs of a replica."""
        sizes = [
            int(self.engine.get(name, 1)) for name in (_TENSOR_PARALLEL_SIZE, *_PARALLEL_SIZES)
        ]
        return self.gpus_per_replica or math.prod(sizes)

    @property
    def tensor_parallel_size(self) -> int:
        """GPUs over which each stage and rank of a replica splits the model's tensors."""
        return self.num_gpus // math.prod(int(self.engine.get(name, 1)) for name in _PARALLEL_SIZES)

    @property
    def preset(self) -> Preset:
        """The named preset, or a default one for another checkpoint."""
        return preset_of(self.checkpoint)

    @property
    def fork_adapter_folder(self) -> Path | None:
        """The adapter of requests that may fork; None if there is none."""
        if self.fork_adapter is not None:
            folder = Path(self.fork_adapter).expanduser()
            return None if self.fork_adapter == NO_ADAPTER else folder
        found = adapter_in(self.preset.path)
        named = {Path(adapter.folder).resolve() for adapter in self.adapters}
        return None if found is None or found.resolve() in named else found

    def check_checkpoint(self) -> None:
        """Raise ConfigError if a folder of the model is missing, or its files are not usable.

        Models on the Hugging Face hub are not looked up.
        """
        path = Path(self.preset.path)
        try:
            check_name(self.checkpoint, list(PRESETS))
            self.preset.check_fetched()
            if path.is_dir():
                load_format = self.engine.get("load_format", "auto")
                check_checkpoint_folder(
                    path,
                    has_configuration=not self.engine.get("hf_config_path"),
                    has_weights=load_format in ("auto", "hf", "safetensors"),
                )
        except ConfigError as error:
            raise ConfigError(f"checkpoint: {error}") from error
        if (fork_adapter := self.fork_adapter_folder) is not None:
            try:
                check_adapter_folder(fork_adapter)
            except ConfigError as error:
                raise ConfigError(f"fork_adapter: {error}") from error
        for adapter in self.adapters:
            try:
                check_name(adapter.folder, ())
                if Path(adapter.folder).is_dir():
                    check_adapter_folder(Path(adapter.folder))
            except ConfigError as error:
                raise ConfigError(f"adapters: {adapter.name}: {error}") from error
        if self.prompt_chain is not None and not Path(self.prompt_chain.path).is_dir():
            raise ConfigError(
                f"prompt_chain.prompt_tokens: no such folder: {self.prompt_chain.path}"
            )

    @property
    def public_name(self) -> str:
        """The model's name in the API."""
        if self.name is not None or self.checkpoint in PRESETS:
            return self.name or self.checkpoint
        path = Path(self.preset.path)
        return path.resolve().name if path.exists() else self.checkpoint

    @property
    def public_names(self) -> tuple[str, ...]:
        """Names by which requests reach this model: its own, then those of its adapters."""
        return (self.public_name, *(adapter.name for adapter in self.adapters))

    @property
    def deployment_name(self) -> str:
        """The name of this model's deployment in Ray Serve."""
        return "Replica-" + re.sub(r"[^A-Za-z0-9._-]", "-", self.public_name)

    @property
    def max_replicas(self) -> int:
        """Maximum number of replicas."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def min_replicas(self) -> int:
        """Minimum number of replicas."""
        return self.replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def target_threads(self) -> float:
        """The autoscaler's target threads per replica."""
        given = None if self.autoscaling is None else self.autoscaling.target_threads
        return given or DEFAULT_TARGET_SHARE * self.threads_per_replica

    @property
    def requests_per_replica(self) -> int:
        """The limit on running requests per replica."""
        return self.max_concurrency or self.preset.max_concurrency

    @property
    def threads_per_replica(self) -> int:
        """vLLM's `max_num_seqs`, the limit on running threads per replica.

        Never fewer than the requests, or the root threads of admitted requests would have to wait.
        """
        wanted = math.ceil(self.requests_per_replica * self.threads_per_request)
        return max(self.requests_per_replica, min(wanted, MAX_THREADS))

    @property
    def kv_cache_bytes(self) -> int:
        """Size of a replica's KV cache on CPU."""
        return int((self.kv_cache_gib or self.preset.kv_cache_gib) * 2**30)

    @property
    def gpus_in_ray(self) -> float:
        """GPUs that Ray reserves for a replica; with a share, several replicas fit on one GPU."""
        if self.num_gpus == 1 and self.gpu_memory_share is not None:
            return self.gpu_memory_share
        return float(self.num_gpus)
