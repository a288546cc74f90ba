"""Retry and timeout limits when a replica is lost."""

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat

FIRST_PAUSE_S = 0.1
"""Pause before the first retry: a replica accepts requests for a moment after its engine died."""
MAX_DEATHS = 2
"""Engines that may die under a request. One death may be chance; a request that kills engines must
not reach all of them."""
_PAUSE_GROWTH = 4.0
_LONGEST_PAUSE_S = 2.0


def pause_before_retry_s(num_lost: int, first_s: float = FIRST_PAUSE_S) -> float:
    """Return the seconds to wait before a request is retried after so many lost replicas."""
    return min(first_s * _PAUSE_GROWTH ** (num_lost - 1), _LONGEST_PAUSE_S)


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
