"""Retry and timeout limits when a replica is lost."""

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat


class RetryConfig(BaseModel):
    """Retries of requests whose replica is lost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_retries: NonNegativeInt = Field(
        3,
        description="Maximum number of retries of a request after its replica is lost. A request "
        "that two engines died under is never retried.",
    )
    replica_wait_s: PositiveFloat = Field(
        60.0,
        description="Timeout for a request to find a replica (seconds); after it the client gets a "
        "503. A replica that died needs its start-up time to return.",
    )
    continue_streams: bool = Field(
        True,
        description="Whether a started stream continues on another replica; otherwise it ends with "
        "an error event. Costs a few bytes per token between replica and gateway.",
    )
