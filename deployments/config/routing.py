"""Routing of requests to the replicas of a model."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt


class RoutingPolicy(StrEnum):
    """Policies of `deployments/routing/policies.py`; all but the first are for comparison."""

    THREADS = "threads"
    POWER_OF_TWO = "power_of_two"
    FEWEST_REQUESTS = "fewest_requests"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"


class RoutingSettings(BaseModel):
    """Routing policy and its parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: RoutingPolicy = Field(
        RoutingPolicy.THREADS,
        description="Routing policy. `threads` estimates the threads and KV blocks of the request; "
        "the others, for comparison, count requests or nothing.",
    )
    affinity: NonNegativeFloat = Field(
        1.0,
        le=2.0,
        description="Value of a cached prefix in routing, as a multiple of the time to compute it; "
        "0 ignores cached prefixes. Above 2, requests with a common prefix would crowd on the "
        "replicas that have it. Only for `threads`.",
    )
    affinity_entries: PositiveInt = Field(
        4096, description="Number of prompt prefixes that a router remembers. Only for `threads`."
    )
    direct: bool = Field(
        True,
        description="Call replicas over connections of our own, which cost less than Ray Serve's "
        "handle. Where the network lets none through, the handle is used.",
    )
    report_period_s: PositiveFloat = Field(
        0.2,
        ge=0.05,
        description="Interval at which a replica reports its load to the routers (seconds).",
    )
