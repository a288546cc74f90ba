"""The gateway's settings, and the part that can change while it runs."""

from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from deployments.config import ClusterConfig, ConfigError, problems_of
from deployments.config.cors import CorsConfig
from deployments.config.key_store import KeyStoreConfig
from deployments.config.keys import KeyConfig, check_keys, is_loopback
from deployments.config.limits import LimitsConfig
from deployments.config.logging import LoggingConfig
from deployments.config.model import ModelConfig
from deployments.config.retries import RetryConfig
from deployments.config.routing import RoutingSettings
from deployments.config.tracing import TracingConfig


class ServedModel(BaseModel):
    """A model's name, its adapters' names, its deployment, and the limits of its queue.

    `replicas` is the assumed number of running replicas until Ray Serve reports it; `wanted` is the
    minimum that should run. `forks_with_tools`: whether answers that may call tools fork.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    adapters: tuple[str, ...] = ()
    deployment: str
    replicas: PositiveInt = 1
    wanted: NonNegativeInt = 1
    requests_per_replica: PositiveInt
    max_queued: NonNegativeInt
    max_queue_s: PositiveFloat = 60.0
    forks_with_tools: bool = False

    @classmethod
    def of(cls, model: ModelConfig) -> "ServedModel":
        """Return the settings of a configured model."""
        return cls(
            name=model.public_name,
            adapters=tuple(adapter.name for adapter in model.adapters),
            deployment=model.deployment_name,
            replicas=model.max_replicas,
            wanted=model.min_replicas,
            requests_per_replica=model.requests_per_replica,
            max_queued=model.max_queued_requests,
            max_queue_s=model.max_queue_s,
            forks_with_tools=bool(model.tool_call_starts),
        )


class GatewaySettings(BaseModel):
    """The gateway's part of the cluster's configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: tuple[ServedModel, ...]
    aliases: dict[str, str] = {}
    fallback: dict[str, str] = {}
    gateways: PositiveInt | Literal["per-node"] = 1
    keys: tuple[KeyConfig, ...] = ()
    keys_file: Path | None = None
    # None: usage is not stored, and keys cannot be created at run time.
    key_store: KeyStoreConfig | None = None
    cors: CorsConfig = CorsConfig()
    # Names in `Host` besides loopback ones; None: any.
    allowed_hosts: tuple[str, ...] | None = None
    limits: LimitsConfig = LimitsConfig()
    logging: LoggingConfig = LoggingConfig()
    retries: RetryConfig = RetryConfig()
    tracing: TracingConfig = TracingConfig()
    page: bool = False
    metrics: bool = True
    # Port of the page of the gateway's node; None if another program serves it.
    metrics_port: int | None = None
    # Timeout of GET requests: a call to a model without replicas would wait until there is one.
    models_wait_s: PositiveFloat = 5.0

    @property
    def shares_state(self) -> bool:
        """Whether other gateways may run beside this one."""
        return self.gateways != 1

    @property
    def num_gateways(self) -> int:
        """Number of configured gateways; 1 if it follows the number of nodes."""
        return self.gateways if isinstance(self.gateways, int) else 1


def gateway_settings(config: ClusterConfig) -> GatewaySettings:
    """Return the gateway's settings for a configuration."""
    # Ray's processes may have another working directory.
    file = None if config.keys_file is None else config.keys_file.expanduser().absolute()
    return GatewaySettings(
        models=tuple(ServedModel.of(model) for model in config.models),
        aliases=config.aliases,
        fallback=config.fallback,
        gateways=config.gateways,
        keys=config.keys,
        keys_file=file,
        key_store=config.key_store.placed(config.limits.rate_storage, config.port)
        if config.asks_for_keys
        else None,
        cors=config.cors,
        allowed_hosts=config.allowed_hosts if is_loopback(config.host) else None,
        limits=config.limits,
        logging=config.logging,
        retries=config.retries,
        page=config.serves_page,
        metrics=config.metrics.enabled,
        metrics_port=config.metrics_port_of_nodes,
        tracing=config.tracing,
    )


class InPlaceSettings(BaseModel):
    """A hand-written `user_config` of the gateway; absent parts stay as deployed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[KeyConfig, ...] | None = Field(
        None, description="As in the cluster's configuration file."
    )
    limits: LimitsConfig | None = Field(None, description="As in the cluster's configuration file.")
    logging: LoggingConfig | None = Field(
        None, description="As in the cluster's configuration file."
    )
    retries: RetryConfig | None = Field(None, description="As in the cluster's configuration file.")
    routing: RoutingSettings | None = Field(
        None, description="As in the cluster's configuration file."
    )

    def over(self, gateway: GatewaySettings) -> GatewaySettings:
        """Return the gateway's settings with these changes.

        Raises ConfigError for a change that would remove all keys: it would open the gateway to
        everyone.
        """
        names = ("keys", "limits", "logging", "retries")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        changed = gateway.model_copy(update=given)
        if _requires_keys(gateway) and not _requires_keys(changed):
            raise ConfigError("keys: without any key, everyone could call the API")
        return changed


def in_place_settings(user_config: dict[str, Any]) -> InPlaceSettings:
    """Parse a `user_config`. Raises ConfigError that names the invalid field."""
    try:
        settings = InPlaceSettings.model_validate(user_config)
        check_keys(settings.keys or ())
    except ValidationError as error:
        raise ConfigError(f"user_config: {problems_of(error, InPlaceSettings)}") from None
    except ValueError as error:
        raise ConfigError(f"user_config: {error}") from None
    return settings


def _requires_keys(gateway: GatewaySettings) -> bool:
    return bool(gateway.keys) or gateway.keys_file is not None
