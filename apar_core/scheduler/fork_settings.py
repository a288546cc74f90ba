"""Fork settings of one engine, in vLLM's `additional_config`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)
from vllm.config import CompilationMode, VllmConfig

from apar_core.attention.settings import FamilySettings
from apar_core.errors import EngineError
from apar_core.formats.resolved_format import FormatSetting
from apar_core.scheduler.fork_policy import FIRST_TOKEN_S, PolicyName
from apar_core.suggestions import did_you_mean_field

CONFIG_KEY = "apar"
"""Key of these settings in `additional_config`."""


class ForkSettings(BaseModel):
    """Limits on threads and requests, the fork policy, and separators in the restored text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(True, description="Whether requests fork unless they say otherwise.")
    adapters: dict[str, bool] = Field(
        {},
        description="Whether requests to a LoRA adapter fork unless they say otherwise, by its "
        "name; others as `enabled`.",
    )
    fork_adapter: Path | None = Field(
        None,
        description="Folder of a LoRA adapter. Requests that may fork are answered with it, unless "
        "they name another; all others by the base model alone.",
    )
    max_threads: PositiveInt = Field(
        32, description="Live threads per request; further forks wait."
    )
    max_forks: PositiveInt = Field(
        512,
        description="Forks per request; a further one opens no thread, and the finish reason is "
        "length.",
    )
    max_replica_threads: PositiveInt | None = Field(
        None,
        description="Live threads of all requests; further forks wait. Without it, only vLLM's "
        "max_num_seqs limits what runs.",
    )
    max_requests: PositiveInt | None = Field(
        None,
        description="Running requests, each with all its threads; further requests wait in the "
        "engine. Without it, only vLLM's max_num_seqs limits what runs.",
    )
    policy: PolicyName = Field(
        "eager",
        description="When a fork within these limits starts. 'eager': at once. 'adaptive': steps "
        "keep to `token_time_ms` as predicted (`pacing.py`).",
    )
    token_time_ms: PositiveFloat = Field(
        50.0, description="Target time per output token of the adaptive policy (ms)."
    )
    first_token_ms: PositiveFloat = Field(
        1000 * FIRST_TOKEN_S,
        description="Time to first token that the adaptive policy may use for smaller chunks of "
        "the prompt (ms).",
    )
    step_costs: Path | None = Field(
        None,
        description="Step costs file (`apar experiment calibrate`) from which the adaptive policy "
        "starts; without it, the policy is eager for the first steps.",
    )
    growth_reserve_tokens: NonNegativeInt = Field(
        8,
        description="KV cache kept free for each running thread when a waiting request starts "
        "(tokens). Without it, threads that grow preempt each other and are computed again. 0: as "
        "in vLLM.",
    )
    output_interval_s: NonNegativeFloat = Field(
        0.0,
        description="Interval at which the engine core sends a request's tokens to the API process "
        "(seconds); twice as long from 16 requests on. 0: after each step, as in vLLM.",
    )
    metrics: bool = Field(
        True,
        description="Export `apar_*` metrics on the `/metrics` of vLLM's own server, unless its "
        "statistics are off.",
    )
    parallel_format: FormatSetting | None = Field(
        None,
        description="How the checkpoint marks parallel text: the name of a format, or a "
        "definition. By default it is recognised by its tokens.",
    )
    separators: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Insert line breaks between paragraphs whose text lacks them. 'auto': only for "
        "the released checkpoints (THUDM/apar-7b, THUDM/apar-13b), which were trained this way.",
    )
    tool_call_starts: tuple[str, ...] = Field(
        (),
        description="Tokens with which a tool call begins, such as <tool_call>. Requests with "
        "tools fork until one of them; without, they do not fork. `apar serve` knows those of most "
        "`tool_call_parser`s.",
    )
    prompt_tokens: Path | None = Field(
        None,
        description="Folder of prompt tokens (`apar train-prompts`) for speculation with a chain "
        "of them: see `engine/prompt_chain.py`.",
    )
    attention: Literal["ordinary", "family"] = Field(
        "ordinary",
        description="How a decoding step reads the KV cache. 'ordinary': as vLLM does, each thread "
        "its blocks. 'family': blocks that threads share once; where a model or feature does not "
        "fit, as without it, with a warning.",
    )
    family: FamilySettings = Field(
        FamilySettings(),
        description="Least that a family of threads must share to be read together.",
    )


def generates(vllm_config: VllmConfig) -> bool:
    """Return whether an engine's model generates text; embedding models have nothing to fork."""
    return vllm_config.model_config.runner_type == "generate"


def check_engine(vllm_config: VllmConfig) -> None:
    """Raise EngineError for an engine that cannot fork, or that would die at the first request."""
    if not generates(vllm_config):
        return
    if isinstance(vllm_config.scheduler_config.scheduler_cls, str):
        raise EngineError(
            "the vLLM plugin has not prepared this engine: VLLM_PLUGINS, if set, must contain apar"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise EngineError(
            "forking needs prefix caching, through which children share their parent's KV "
            "blocks: set enable_prefix_caching=True"
        )
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    # vLLM 0.32 allocates what a stage receives when it compiles the model, or profiles it on a GPU.
    if (
        num_stages > 1
        and vllm_config.device_config.device_type == "cpu"
        and vllm_config.compilation_config.mode == CompilationMode.NONE
    ):
        raise EngineError(
            f"pipeline_parallel_size={num_stages}: without compilation (enforce_eager), vLLM's "
            "pipeline stages on a CPU fail at the first request"
        )


def fork_settings(vllm_config: VllmConfig) -> ForkSettings:
    """Return the settings in an engine's `additional_config`.

    Raises EngineError, which names the invalid field.
    """
    additional = vllm_config.additional_config
    values = additional.get(CONFIG_KEY, {}) if isinstance(additional, dict) else {}
    try:
        return ForkSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in (CONFIG_KEY, *first["loc"]))
        raise EngineError(
            f"additional_config: {field}: {first['msg']} (got {first['input']!r})"
            f"{did_you_mean_field(first, ForkSettings)}"
        ) from error
