"""What of a cluster's configuration changes in the running gateway, without a new replica."""

from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from cluster.config import ClusterConfig, ConfigError, problems_of
from cluster.config.keys import KeyConfig, check_keys
from cluster.config.limits import LimitsConfig
from cluster.config.logging import LoggingConfig
from cluster.config.model import ModelConfig
from cluster.config.retries import RetryConfig
from cluster.config.routing import RoutingSettings
from cluster.config.tracing import TracingConfig


class ServedModel(BaseModel):
    """A model's name, its deployment, and how many of its requests the gateway lets in.

    `replicas` are taken to run until Ray Serve has said how many do; `wanted` is the least number
    that should.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    deployment: str
    replicas: PositiveInt = 1
    wanted: NonNegativeInt = 1
    requests_per_replica: PositiveInt
    max_queued: NonNegativeInt
    max_queue_s: PositiveFloat = 60.0

    @classmethod
    def of(cls, model: ModelConfig) -> "ServedModel":
        """A model of the cluster's configuration."""
        return cls(
            name=model.public_name,
            deployment=model.deployment_name,
            replicas=model.max_replicas,
            wanted=model.min_replicas,
            requests_per_replica=model.requests_per_replica,
            max_queued=model.max_queued_requests,
            max_queue_s=model.max_queue_s,
        )


class GatewaySettings(BaseModel):
    """All that a gateway is told of the cluster's configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: tuple[ServedModel, ...]
    keys: tuple[KeyConfig, ...] = ()
    keys_file: Path | None = None
    limits: LimitsConfig = LimitsConfig()
    logging: LoggingConfig = LoggingConfig()
    retries: RetryConfig = RetryConfig()
    tracing: TracingConfig = TracingConfig()
    metrics: bool = True
    # A call to a model without a replica waits until there is one again.
    models_wait_s: PositiveFloat = 5.0


def gateway_settings(config: ClusterConfig) -> GatewaySettings:
    """What the gateway is told of the configuration."""
    # Ray's processes may have another working directory.
    file = None if config.keys_file is None else config.keys_file.expanduser().absolute()
    return GatewaySettings(
        models=tuple(ServedModel.of(model) for model in config.models),
        keys=config.keys,
        keys_file=file,
        limits=config.limits,
        logging=config.logging,
        retries=config.retries,
        metrics=config.metrics.enabled,
        tracing=config.tracing,
    )


class InPlaceSettings(BaseModel):
    """The gateway's `user_config` as a person writes it; what is absent stays as it was built."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[KeyConfig, ...] | None = Field(None, description="As in a cluster's file.")
    limits: LimitsConfig | None = Field(None, description="As in a cluster's file.")
    logging: LoggingConfig | None = Field(None, description="As in a cluster's file.")
    retries: RetryConfig | None = Field(None, description="As in a cluster's file.")
    routing: RoutingSettings | None = Field(None, description="As in a cluster's file.")

    def over(self, gateway: GatewaySettings) -> GatewaySettings:
        """The gateway's settings with these over them; raises ConfigError where it cannot be.

        A gateway that asks for keys goes on asking: no change by which everyone may call.
        """
        names = ("keys", "limits", "logging", "retries")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        changed = gateway.model_copy(update=given)
        if _asks_for_keys(gateway) and not _asks_for_keys(changed):
            raise ConfigError("keys: none would be left, and then everyone could call")
        return changed


def in_place_settings(user_config: dict[str, Any]) -> InPlaceSettings:
    """The settings of a `user_config`; raises ConfigError that names what is wrong with it."""
    try:
        settings = InPlaceSettings.model_validate(user_config)
        check_keys(settings.keys or ())
    except ValidationError as error:
        raise ConfigError(f"user_config: {problems_of(error)}") from None
    except ValueError as error:
        raise ConfigError(f"user_config: {error}") from None
    return settings


def _asks_for_keys(gateway: GatewaySettings) -> bool:
    return bool(gateway.keys) or gateway.keys_file is not None
