"""Whether and when a request is sent again after the loss of its replica, and how often it was."""

import asyncio
from dataclasses import dataclass

from apar_core.errors import EngineError
from cluster.retry_config import RetryConfig

# A replica whose engine has died still takes requests for most of a second.
_FIRST_PAUSE_S = 0.1
_PAUSE_GROWTH = 4
_LONGEST_PAUSE_S = 2.0


class ReplicaLostError(EngineError):
    """The replica died, hands its requests over, or cannot be reached, while it held a request."""


class ReplicaBrokenError(ReplicaLostError):
    """The replica said itself that it cannot go on."""


class NoReplicaError(ReplicaLostError):
    """No replica has taken the request for so long that it will not be tried again."""


@dataclass(slots=True)
class RetryCounters:
    """What became of requests whose replica was lost, since the start.

    `retried` were sent again from the start, `continued` taken up in the middle of their stream;
    a request may be either several times. `given_up` got an error.
    """

    retried: int = 0
    continued: int = 0
    given_up: int = 0


class Retries:
    """The rule for all requests of one model, and their counters."""

    def __init__(
        self, config: RetryConfig | None = None, *, first_pause_s: float = _FIRST_PAUSE_S
    ) -> None:
        self.config = config or RetryConfig()
        self.first_pause_s = first_pause_s
        self.counters = RetryCounters()

    def attempts(self) -> "Attempts":
        """The attempts of one request."""
        return Attempts(self)


class Attempts:
    """How often one request has been sent."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._num_lost = 0

    async def another(self, error: ReplicaLostError, *, continued: bool) -> None:
        """Wait a little before the next attempt; raises the error where there may be none."""
        self._num_lost += 1
        counters = self._retries.counters
        if self._num_lost > self._retries.config.max_retries or isinstance(error, NoReplicaError):
            self.give_up(error)
        if continued:
            counters.continued += 1
        else:
            counters.retried += 1
        pause_s = self._retries.first_pause_s * _PAUSE_GROWTH ** (self._num_lost - 1)
        await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))

    def give_up(self, error: ReplicaLostError) -> None:
        """Raise the error, and count it."""
        self._retries.counters.given_up += 1
        raise error
