"""What the gateway does when it loses a replica."""

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat


class RetryConfig(BaseModel):
    """Calling again where a replica was lost under a request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_retries: NonNegativeInt = Field(
        3,
        description="How often a request is sent again after the loss of its replica; 0 for never. "
        "One under which two engines have died is not sent again, whatever the number.",
    )
    replica_wait_s: PositiveFloat = Field(
        60.0,
        description="Longest wait of a request for a replica to take it, in seconds; then the "
        "client gets a 503. A replica that has died takes its start-up time to return.",
    )
    continue_streams: bool = Field(
        True,
        description="Whether a stream that has begun goes on at another replica; else it ends "
        "with an error event. Costs a few bytes a token between replica and gateway.",
    )
