"""What a gateway serves, to whom, and its limits."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from cluster.config import ClusterConfig
from cluster.keys_config import KeyConfig
from cluster.limits_config import LimitsConfig
from cluster.logging_config import LoggingConfig
from cluster.model_config import ModelConfig
from cluster.retry_config import RetryConfig
from cluster.tracing_config import TracingConfig


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
