"""What `apar serve` needs to know, as one model; and the models it knows by name."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
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

from apar_core.errors import AparError

DEFAULT_MODEL = "apar-tiny"
DEFAULT_MAX_CONCURRENCY = 64
# Beyond this a CUDA graph and the sampler's buffers cost more than the batch brings.
MAX_THREADS = 1024
_MODELS = Path(__file__).resolve().parent.parent / "apar_core" / "models"


class ConfigError(AparError):
    """The configuration cannot be used; the message names the field."""


class StartError(AparError):
    """The application did not come up."""


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


class ServeConfig(BaseModel):
    """One model behind one address."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        DEFAULT_MODEL, min_length=1, description="Preset, checkpoint folder or hub name."
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="Name that clients send; the preset's or the folder's name."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    replicas: PositiveInt = Field(1, description="Engines behind the address.")
    max_concurrency: PositiveInt | None = Field(
        None, description="Requests that one replica runs at once; from the preset when absent."
    )
    max_queued_requests: NonNegativeInt = Field(
        512, description="Requests that wait for a replica; one more gets a 503."
    )
    threads_per_request: PositiveFloat = Field(
        4.0, ge=1, description="Threads that a request has on average, for sizing the engine."
    )
    kv_cache_gib: PositiveFloat | None = Field(
        None, description="KV cache of a replica on CPU, in GiB; 0.25 for apar-tiny, else 4."
    )
    cpu_threads: PositiveInt | None = Field(
        None, description="Executors of a replica's matrix kernels on CPU; cores / replicas."
    )
    coalesce_s: NonNegativeFloat = Field(
        0.05,
        le=1,
        description="Time within which tokens of a stream are sent on together; up to four times "
        "as long with many streams; 0 sends each at once.",
    )
    ray_address: str | None = Field(
        None, min_length=1, description="Running Ray cluster to use; a private one when absent."
    )
    engine: dict[str, Any] = Field(
        default_factory=dict, description="vLLM engine arguments, by their Python names."
    )

    @property
    def preset(self) -> Preset:
        """The named preset, or one for a checkpoint that has none."""
        path = str(Path(self.model).expanduser()) if self.model.startswith("~") else self.model
        return PRESETS.get(self.model) or Preset(path, DEFAULT_MAX_CONCURRENCY)

    @property
    def public_name(self) -> str:
        """The `model` that clients send."""
        if self.served_model_name is not None or self.model in PRESETS:
            return self.served_model_name or self.model
        path = Path(self.preset.path)
        return path.resolve().name if path.exists() else self.model

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
        default_gib = 0.25 if self.model == DEFAULT_MODEL else 4.0
        return int((self.kv_cache_gib or default_gib) * 2**30)


def load_config(path: Path | None, overrides: dict[str, Any]) -> ServeConfig:
    """The file's configuration with the command line's values (those not None) over it.

    Raises ConfigError for an unreadable file, unknown keys and values out of range.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: {error}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"{path}: a mapping of settings is expected")
        values.update(loaded or {})
    values.update({key: value for key, value in overrides.items() if value is not None})
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors()
        )
        raise ConfigError(problems) from error
