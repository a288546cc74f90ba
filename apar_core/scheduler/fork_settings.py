"""Limits on forking, set per engine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from vllm.config import VllmConfig

from apar_core.errors import EngineError
from apar_core.scheduler.fork_policy import PolicyName

CONFIG_KEY = "apar"
"""Key of these settings in vLLM's `additional_config`."""


class ForkSettings(BaseModel):
    """Limits on the threads of one request, and how its text is put together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(True, description="Whether requests fork unless they say otherwise.")
    max_threads: PositiveInt = Field(
        32, description="Threads of one request alive at once; a fork beyond it waits."
    )
    max_forks: PositiveInt = Field(
        512, description="Forks of one request in all; beyond it the answer ends by length."
    )
    max_replica_threads: PositiveInt | None = Field(
        None,
        description="Threads of all requests alive at once, beyond which a fork waits; absent, "
        "vLLM's max_num_seqs alone bounds what runs.",
    )
    max_requests: PositiveInt | None = Field(
        None,
        description="Requests that run at once, each with all its threads, beyond which a request "
        "waits in the engine; absent, vLLM's max_num_seqs alone bounds what runs.",
    )
    policy: PolicyName = Field(
        "eager",
        description="When a fork within these limits starts. 'eager': at once. 'adaptive': while "
        "the predicted engine step leaves the running requests their `token_time_ms`.",
    )
    token_time_ms: PositiveFloat = Field(
        50.0, description="Time per output token, in ms, that the adaptive policy keeps to."
    )
    separators: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Put line breaks back between paragraphs whose text lacks them. 'auto': only "
        "for the released checkpoints (THUDM/apar-7b, THUDM/apar-13b), which were trained so.",
    )


def fork_settings(vllm_config: VllmConfig) -> ForkSettings:
    """The settings in an engine's `additional_config`. Raises EngineError naming a wrong field."""
    additional = vllm_config.additional_config
    values = additional.get(CONFIG_KEY, {}) if isinstance(additional, dict) else {}
    try:
        return ForkSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in (CONFIG_KEY, *first["loc"]))
        raise EngineError(
            f"additional_config: {field}: {first['msg']} (got {first['input']!r})"
        ) from error
