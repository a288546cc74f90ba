"""A cluster's configuration: the address, and the models behind it."""

from collections import Counter
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    ValidationError,
    model_validator,
)

from apar_core.errors import AparError
from cluster.config.keys import KeyConfig, check_keys, is_loopback
from cluster.config.limits import LimitsConfig
from cluster.config.logging import LoggingConfig
from cluster.config.metrics import MetricsConfig
from cluster.config.model import ModelConfig
from cluster.config.retries import RetryConfig
from cluster.config.routing import RoutingSettings
from cluster.config.tracing import TracingConfig


class ConfigError(AparError):
    """The configuration cannot be used; the message names the field."""


class StartError(AparError):
    """The application did not come up."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which would let the last of two equal keys win unseen."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node


_MODELS = ("models",)
# Someone may have put the key itself where its hash belongs.
_SECRET_FIELDS = (
    "keys",
    "hash",
    "cache_secret",
    "rate_storage",
    "rate_storage_password",
    "env",
    "endpoint",
)


class ClusterConfig(BaseModel):
    """One address, and the models that it serves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    ray_address: str | None = Field(
        None, min_length=1, description="Running Ray cluster to use; a private one when absent."
    )
    drain_s: NonNegativeFloat = Field(
        30.0,
        description="Time that running requests get to end when a replica, or all, must stop; "
        "what is left then goes on elsewhere, or ends with an error.",
    )
    models: tuple[ModelConfig, ...] = Field(
        (ModelConfig(),), min_length=1, description="The models; apar-tiny when absent."
    )
    routing: RoutingSettings = Field(
        RoutingSettings(), description="How a request's replica is chosen."
    )
    keys: tuple[KeyConfig, ...] = Field(
        (), description="API keys, by their hashes; `apar keys new` makes one."
    )
    keys_file: Path | None = Field(
        None, description="YAML or JSON file with a list of further `keys`; read when it changes."
    )
    allow_anonymous: bool = Field(
        False,
        description="Whether everyone may call without a key; needed where no keys are configured "
        "and others than this machine can reach `host`.",
    )
    limits: LimitsConfig = Field(LimitsConfig(), description="Limits for everyone.")
    logging: LoggingConfig = Field(LoggingConfig(), description="What is logged, and where.")
    retries: RetryConfig = Field(
        RetryConfig(), description="What becomes of requests whose replica is lost."
    )
    metrics: MetricsConfig = Field(
        MetricsConfig(), description="What the cluster tells Prometheus, and where."
    )
    tracing: TracingConfig = Field(
        TracingConfig(), description="OpenTelemetry traces of requests; off when absent."
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for names in ("public_name", "deployment_name"):
            counts = Counter(getattr(model, names) for model in self.models)
            name, count = counts.most_common(1)[0]
            if count > 1:
                raise ValueError(f"models: {count} of them are called {name!r}; give each a `name`")
        return self

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        check_keys(self.keys)
        if self.allow_anonymous and self.asks_for_keys:
            raise ValueError("allow_anonymous: true contradicts `keys` and `keys_file`")
        if not (self.asks_for_keys or self.allow_anonymous or is_loopback(self.host)):
            raise ValueError(
                f"host: {self.host} can be reached by others, and nothing says who may call: "
                "configure `keys` or `keys_file`, or set `allow_anonymous: true`"
            )
        served = {model.public_name for model in self.models}
        for key in self.keys:
            if unknown := sorted(set(key.models or ()) - served):
                raise ValueError(f"keys: {key.name!r} names models not served here: {unknown}")
        return self

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        if self.ray_address is not None and self.metrics.port is not None:
            raise ValueError(
                "metrics.port: a running Ray cluster has its own, from `ray start "
                "--metrics-export-port`; leave it out beside `ray_address`"
            )
        return self

    def check_secrets(self) -> None:
        """Raise SecretError where a secret cannot be read by this process."""
        self.limits.read_storage_uri()
        self.limits.read_cache_secret()
        self.tracing.read_headers()

    @property
    def asks_for_keys(self) -> bool:
        """Whether a request needs an API key."""
        return bool(self.keys) or self.keys_file is not None

    @property
    def num_replicas(self) -> int:
        """Most engines of all models together."""
        return sum(model.max_replicas for model in self.models)


def load_config(
    path: Path | None, overrides: dict[str, Any], model_overrides: dict[str, Any]
) -> ClusterConfig:
    """The file's configuration with the command line's values (those not None) over it.

    `model_overrides` are for the only model. Raises ConfigError for an unreadable file, unknown
    keys, values out of range, and model overrides where the file names several models.
    """
    values = _read(path) if path is not None else {}
    values |= _given(overrides)
    model_values = _given(model_overrides)
    models = values.get("models", [{}])
    if model_values and isinstance(models, list) and len(models) != 1:
        raise ConfigError(
            f"{path} names {len(models)} models; set {', '.join(model_values)} there, for each"
        )
    if model_values and isinstance(models, list) and isinstance(models[0], dict):
        values["models"] = [models[0] | model_values]
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        problems = problems_of(error)
        raise ConfigError(f"{path}: {problems}" if path is not None else problems) from error


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def read_yaml(path: Path) -> Any:
    """What a YAML file holds; raises ConfigError for one that cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    loaded = read_yaml(path)
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a mapping of settings is expected")
    return loaded or {}


def problems_of(error: ValidationError) -> str:
    """What is wrong with a file, each problem with its place."""
    return "; ".join(
        _problem(problem)
        for problem in error.errors()
        # A list whose only items are wrong is not also too short.
        if not (problem["type"] == "too_short" and problem["input"] and problem["loc"] == _MODELS)
    )


def _problem(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if not place:
        return str(message)
    shown = f" (got {problem['input']!r})" if _may_be_shown(problem) else ""
    return f"{place}: {message}{shown}"


def _may_be_shown(problem: Any) -> bool:
    """Whether the wrong value is a plain one of its own and surely no secret.

    A whole record or an item of a list may be, or hold, an API key.
    """
    field = problem["loc"][-1]
    if problem["type"] == "extra_forbidden" or field in _SECRET_FIELDS or isinstance(field, int):
        return False
    if "headers" in problem["loc"]:
        return False
    return not isinstance(problem["input"], dict | list | tuple)
