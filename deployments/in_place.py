"""What of a cluster's configuration changes in the running gateway, without a new replica."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.config import ConfigError, problems_of
from cluster.keys_config import KeyConfig, check_keys
from cluster.limits_config import LimitsConfig
from cluster.logging_config import LoggingConfig
from cluster.retry_config import RetryConfig
from cluster.routing_config import RoutingSettings
from deployments.gateway_settings import GatewaySettings


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
