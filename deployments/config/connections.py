"""Limits on the connections of clients, which HAProxy of a private cluster accepts."""

from ipaddress import ip_network
from typing import Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)


class ConnectionsConfig(BaseModel):
    """Limits on clients' connections, so that idle ones do not keep others out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_open: PositiveInt = Field(
        16_384,
        description="Limit on connections that are open at once. Further ones wait until one is "
        "closed. A low limit on open files (`ulimit -Hn`) lowers it: ten connections need 25.",
    )
    max_per_source: PositiveInt | None = Field(
        None,
        description="Limit on open connections from one address (IPv6: one /64 network); further "
        "ones are closed. By default a quarter of `max_open`.",
    )
    unlimited_sources: tuple[str, ...] = Field(
        ("127.0.0.0/8", "::1/128"),
        description="Networks without `max_per_source`. Add the addresses of reverse proxies and "
        "load balancers: the connections of all their clients come from these.",
    )
    header_timeout_s: PositiveFloat = Field(
        10.0,
        le=86_400.0,
        description="Timeout for receiving the head of a request (seconds). A connection on which "
        "nothing has arrived is then closed; one with a part of a head gets a 408.",
    )
    idle_timeout_s: PositiveFloat = Field(
        75.0,
        le=86_400.0,
        description="Time after which a connection without a further request is closed (seconds). "
        "Must be longer than the idle timeout of a load balancer in front.",
    )
    probe_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port at `host` that serves only the health paths, in HTTP, with connections "
        "of its own: they are answered while `max_open` is reached. Clients should not reach it. "
        "By default none.",
    )

    @field_validator("unlimited_sources")
    @classmethod
    def _check_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(ip_network(network)) for network in networks)

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.max_per_source is not None and self.max_per_source > self.max_open:
            raise ValueError(
                f"max_per_source: {self.max_per_source} is above `max_open`, {self.max_open}"
            )
        return self
