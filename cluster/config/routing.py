"""How requests are routed to the replicas of a model."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt


class RoutingPolicy(StrEnum):
    """By what a replica is chosen; all but the first are there to compare with."""

    THREADS = "threads"
    POWER_OF_TWO = "power_of_two"
    FEWEST_REQUESTS = "fewest_requests"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"


class RoutingSettings(BaseModel):
    """How the routers choose replicas."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: RoutingPolicy = Field(
        RoutingPolicy.THREADS,
        description="By what a replica is chosen: the threads and KV blocks that the request will "
        "probably bring, or, to compare, one of the usual ways that count requests or nothing.",
    )
    affinity: NonNegativeFloat = Field(
        1.0,
        le=2.0,
        description="Worth of a prompt's beginning that a replica holds already, as a multiple of "
        "the time that computing it anew would take; 0 ignores it, and beyond 2 requests with a "
        "common beginning would crowd on the replicas that hold it. Only for `threads`.",
    )
    affinity_entries: PositiveInt = Field(
        4096, description="Beginnings of prompts that a router remembers. Only for `threads`."
    )
    report_period_s: PositiveFloat = Field(
        0.2, ge=0.05, description="Time between two reports of a replica to its routers."
    )
