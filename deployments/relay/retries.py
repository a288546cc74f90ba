"""Whether and when a request is sent again after the loss of its replica, and how often it was."""

import asyncio
from dataclasses import dataclass

from apar_core.errors import EngineError
from cluster.config.retries import RetryConfig

# A replica whose engine has died still takes requests for most of a second.
_FIRST_PAUSE_S = 0.1
_PAUSE_GROWTH = 4
_LONGEST_PAUSE_S = 2.0
# One death may be chance. A request that kills engines must not reach all of them.
_MAX_DEATHS = 2


class ReplicaLostError(EngineError):
    """The replica died, hands its requests over, or cannot be reached, while it held a request.

    `engine_died` says that the replica told of its engine's death. `replica` is its id where that
    is known.
    """

    def __init__(
        self, message: str, *, engine_died: bool = False, replica: str | None = None
    ) -> None:
        super().__init__(message)
        self.engine_died = engine_died
        self.replica = replica


class ReplicaBrokenError(ReplicaLostError):
    """The replica said itself that it cannot go on."""


class EnginesDiedError(ReplicaLostError):
    """So many engines died under a request that it may be the cause, and is not sent again."""


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
    """How often one request has been sent, and how many engines have died under it."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._num_lost = 0
        # A replica takes requests for a moment after its engine has died; that is one death.
        self._dead: set[str | int] = set()

    async def another(self, error: ReplicaLostError, *, continued: bool) -> None:
        """Wait a little before the next attempt; raises the error where there may be none."""
        self._num_lost += 1
        if error.engine_died:
            self._dead.add(error.replica or self._num_lost)
        if len(self._dead) >= _MAX_DEATHS:
            self.give_up(EnginesDiedError(f"{len(self._dead)} engines died, the last: {error}"))
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
