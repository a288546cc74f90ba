"""The configuration file as a whole: the address, and the models behind it."""

import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.config.batches import BatchesConfig
from deployments.config.connections import ConnectionsConfig
from deployments.config.cors import CorsConfig
from deployments.config.files import ConfigError, check_plain_values, problems_of, read_yaml
from deployments.config.key_store import KeyStoreConfig
from deployments.config.keys import KeyConfig, check_keys, is_loopback, load_keys
from deployments.config.limits import LimitsConfig
from deployments.config.logging import LoggingConfig
from deployments.config.metrics import DEFAULT_PORT, MetricsConfig
from deployments.config.model import ModelConfig
from deployments.config.retries import RetryConfig
from deployments.config.routing import RoutingSettings
from deployments.config.tls import TlsConfig
from deployments.config.tracing import TracingConfig

_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class ClusterConfig(BaseModel):
    """One address, and the models that it serves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    ray_address: str | None = Field(
        None,
        min_length=1,
        description="Address of a running Ray cluster. By default `apar serve` starts a private "
        "one.",
    )
    drain_s: NonNegativeFloat = Field(
        30.0,
        description="Time for running requests to finish (seconds) when a replica or the whole "
        "application stops. Streams that are still running continue on another replica if there "
        "is one, or end with an error.",
    )
    gateways: PositiveInt | Literal["per-node"] = Field(
        1,
        description="Number of gateways, the processes that clients' requests pass through; "
        "`per-node` for one on each node of the Ray cluster. Losing one of several ends only its "
        "own connections.",
    )
    restart_id: str = Field(
        "",
        description="Any text. A rollout that changes it replaces all gateways and replicas, one "
        "after the other, without losing a request.",
    )
    models: tuple[ModelConfig, ...] = Field(
        (ModelConfig(),), min_length=1, description="Models to serve; by default apar-tiny."
    )
    aliases: dict[str, str] = Field(
        {}, description="Further names of models and adapters: name -> model or adapter."
    )
    fallback: dict[str, str] = Field(
        {},
        description="Model or adapter that answers instead of another one that has lost all its "
        "replicas, or whose queue is full: name -> name.",
    )
    routing: RoutingSettings = Field(
        RoutingSettings(), description="How a request's replica is chosen."
    )
    keys: tuple[KeyConfig, ...] = Field(
        (), description="API keys, by their hashes. `apar keys new` creates one."
    )
    keys_file: Path | None = Field(
        None,
        description="YAML or JSON file with a list of further `keys`. It is read again when it "
        "changes.",
    )
    key_store: KeyStoreConfig = Field(
        KeyStoreConfig(), description="Where usage and the keys created at run time are stored."
    )
    batches: BatchesConfig = Field(
        BatchesConfig(), description="The Batch API: uploaded files and batches of requests."
    )
    allow_anonymous: bool = Field(
        False,
        description="Whether requests need no API key. Must be set if no keys are configured and "
        "other machines can reach `host`.",
    )
    page: bool | None = Field(
        None,
        description="Whether `GET /` shows a web page to ask the models. By default, only if no "
        "other machine can reach `host`. The page itself needs no API key; its requests do.",
    )
    tls: TlsConfig = Field(
        TlsConfig(), description="HTTPS at `host` and `port`; only without `ray_address`."
    )
    connections: ConnectionsConfig = Field(
        ConnectionsConfig(),
        description="Limits on clients' connections; only without `ray_address`.",
    )
    cors: CorsConfig = Field(
        CorsConfig(), description="Web pages of other origins that may call the server."
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Names that requests may have in the header `Host`, besides `localhost` and "
        "loopback addresses. Only checked if `host` is a loopback address; needed behind a reverse "
        "proxy on the same machine that passes its own name on.",
    )
    limits: LimitsConfig = Field(LimitsConfig(), description="Limits on every request.")
    logging: LoggingConfig = Field(LoggingConfig(), description="Content and place of the logs.")
    retries: RetryConfig = Field(
        RetryConfig(), description="Retry and timeout limits when a replica is lost."
    )
    metrics: MetricsConfig = Field(
        MetricsConfig(), description="Metrics for Prometheus, and where they are served."
    )
    tracing: TracingConfig = Field(
        TracingConfig(), description="OpenTelemetry traces of requests; off by default."
    )

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not _HOST_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a host; leave out scheme, port and path")
        return tuple(name.lower() for name in names)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for counts in (
            Counter(name for model in self.models for name in model.public_names),
            Counter(model.deployment_name for model in self.models),
        ):
            name, count = counts.most_common(1)[0]
            if count > 1:
                raise ValueError(
                    f"models: {count} of them are called {name!r}; give each a different `name`"
                )
        return self

    @model_validator(mode="after")
    def _check_other_names(self) -> Self:
        served = {name for model in self.models for name in model.public_names}
        for field, names in (("aliases", self.aliases), ("fallback", self.fallback)):
            for name, target in names.items():
                if target not in served:
                    raise ValueError(f"{field}: {name!r} leads to {target!r}, which is not served")
                if name == target:
                    raise ValueError(f"{field}: {name!r} leads to itself")
        for name in self.aliases:
            if name in served:
                raise ValueError(f"aliases: {name!r} is the name of a model")
            if not name:
                raise ValueError("aliases: a name is empty")
        home = {name: model.public_name for model in self.models for name in model.public_names}
        for name, target in self.fallback.items():
            if name not in served:
                raise ValueError(f"fallback: {name!r} is not served")
            if home[name] == home[target]:
                raise ValueError(f"fallback: {name!r} and {target!r} have the same replicas")
        return self

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        check_keys(self.keys)
        if self.allow_anonymous and self.asks_for_keys:
            raise ValueError("allow_anonymous: true contradicts `keys` and `keys_file`")
        if not (self.asks_for_keys or self.allow_anonymous or is_loopback(self.host)):
            raise ValueError(
                f"host: other machines can reach {self.host}, so requests need API keys: configure "
                "`keys` or `keys_file`, or set `allow_anonymous: true`"
            )
        served = {name for model in self.models for name in model.public_names}
        for key in self.keys:
            if unknown := sorted(set(key.models or ()) - served):
                raise ValueError(f"keys: {key.name!r} names models that are not served: {unknown}")
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if self.tls.certificate is not None and self.ray_address is not None:
            raise ValueError(
                "tls: on a Ray cluster, the load balancer or the Kubernetes ingress in front of it "
                "terminates TLS; `certificate` works without `ray_address` only"
            )
        return self

    @model_validator(mode="after")
    def _check_connections(self) -> Self:
        if self.connections != ConnectionsConfig() and self.ray_address is not None:
            raise ValueError(
                "connections: on a Ray cluster, the environment of its nodes configures HAProxy; "
                "these settings work without `ray_address` only"
            )
        if self.connections.probe_port == self.port:
            raise ValueError(f"connections.probe_port: {self.port} is the `port` of the server")
        return self

    @property
    def metrics_port_of_nodes(self) -> int | None:
        """Port at which the processes of each node serve its metrics.

        None on a private cluster, where `apar serve` does, and without metrics.
        """
        if self.metrics.enabled and self.ray_address is not None:
            return self.metrics.port or DEFAULT_PORT
        return None

    def check_keys_file(self) -> None:
        """Raise ConfigError if the `keys_file` is invalid or contradicts the `keys`."""
        if self.keys_file is None:
            return
        try:
            loaded = load_keys(self.keys_file.expanduser())
        except ConfigError as error:
            raise ConfigError(f"keys_file: {error}") from error
        try:
            check_keys([*self.keys, *loaded])
        except ValueError as error:
            raise ConfigError(f"keys_file: {self.keys_file}: {error}") from error

    def check_secrets(self) -> None:
        """Raise SecretError if this process cannot read one of the secrets."""
        self.limits.read_storage_uri()
        self.limits.read_cache_secret()
        self.tracing.read_headers()
        self.tls.read_pem()

    @property
    def asks_for_keys(self) -> bool:
        """Whether a request needs an API key."""
        return bool(self.keys) or self.keys_file is not None

    @property
    def serves_page(self) -> bool:
        """Whether `GET /` shows the web page."""
        return is_loopback(self.host) if self.page is None else self.page

    @property
    def num_replicas(self) -> int:
        """Maximum number of engines of all models together."""
        return sum(model.max_replicas for model in self.models)


def load_config(
    path: Path | None, overrides: dict[str, Any], model_overrides: dict[str, Any]
) -> ClusterConfig:
    """Return the configuration of a file, with the command line's values over it unless None.

    `model_overrides` apply to the only model. Raises ConfigError for an invalid file, and for
    model overrides if the file has several models.
    """
    values = None if path is None else read_yaml(path)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a mapping of settings is expected")
    values |= {key: value for key, value in overrides.items() if value is not None}
    given = {key: value for key, value in model_overrides.items() if value is not None}
    models = values.get("models", [{}])
    if given and isinstance(models, list) and len(models) != 1:
        raise ConfigError(
            f"{path} has {len(models)} models; set {', '.join(given)} there, for each of them"
        )
    if given and isinstance(models, list) and isinstance(models[0], dict):
        values["models"] = [models[0] | given]
    try:
        config = ClusterConfig.model_validate(values)
        check_plain_values(values, config)
    except ValidationError as error:
        problems = problems_of(error, ClusterConfig)
        raise ConfigError(f"{path}: {problems}" if path is not None else problems) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path is not None else str(error)) from error
    return config
