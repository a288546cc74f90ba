"""Who may go to the replicas of a model, in which order, when there is not room for all.

The order is by class of priority, then by the virtual time of the keys, then by arrival. A key's
virtual time is advanced by the tokens that all threads of its requests generate, divided by its
weight: forking buys no place in the queue. Source: the virtual token counter (VTC) of Sheng et al.,
"Fairness in Serving Large Language Models" (arXiv 2401.00588), with thread steps for its cost and
the key's mean answer charged in advance, its variant with predicted lengths.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from apar_core.errors import CapacityError
from deployments.drain_rate import DrainRate

# Weight of the newest answer in a key's mean.
_NEWEST = 0.1


@dataclass(slots=True, eq=False)
class Account:
    """One key in one model's queue.

    `virtual_time` counts tokens divided by `weight`. `max_running` bounds the key's requests that
    run at once.
    """

    name: str
    priority: int = 0
    weight: float = 1.0
    max_running: int | None = None
    virtual_time: float = 0.0
    num_running: int = 0
    mean_tokens: float = 0.0
    waiting: "dict[_Waiter, None]" = field(default_factory=dict)  # in order of arrival

    @property
    def may_run(self) -> bool:
        """Whether the key's own bound leaves room for one more request."""
        return self.max_running is None or self.num_running < self.max_running

    @property
    def backlog(self) -> tuple[int, float]:
        """How much the key's waiting requests deserve to be dropped: class, then number."""
        return self.priority, len(self.waiting) / self.weight


@dataclass(slots=True, eq=False)
class _Waiter:
    account: Account
    granted: "asyncio.Future[Ticket]"
    since_s: float


class Ticket:
    """A request's place at the replicas, from the moment it may go there until `leave`."""

    __slots__ = ("_account", "_prepaid", "_queue", "num_tokens", "queued_s")

    def __init__(self, queue: "FairQueue", account: Account, queued_s: float) -> None:
        self._queue = queue
        self._account = account
        self.queued_s = queued_s
        self.num_tokens = 0
        # A burst would otherwise get every free place before its first token is charged.
        self._prepaid = account.mean_tokens
        account.virtual_time += self._prepaid / account.weight

    def charge(self, num_tokens: int) -> None:
        """Advance the key's virtual time by tokens that were generated just now."""
        self.num_tokens += num_tokens
        if self._prepaid:
            paid = min(self._prepaid, num_tokens)
            self._prepaid -= paid
            self._account.virtual_time += (num_tokens - paid) / self._account.weight
        else:
            self._account.virtual_time += num_tokens / self._account.weight

    def leave(self) -> None:
        """Give the place back; once."""
        account = self._account
        account.virtual_time -= self._prepaid / account.weight
        newest = _NEWEST if account.mean_tokens else 1.0
        account.mean_tokens += newest * (self.num_tokens - account.mean_tokens)
        self._queue._leave(account)


@dataclass(frozen=True, slots=True)
class QueueState:
    """How a queue stands: `waiting` by the name of the key; `oldest_wait_s` is 0 without any."""

    running: int
    capacity: int
    waiting: dict[str, int]
    oldest_wait_s: float


class FairQueue:
    """The places at the replicas of one model, and those who wait for one.

    Belongs to one event loop. No more than `capacity` requests run at once; while there is room,
    none waits but those whose key is at its own bound.
    """

    def __init__(
        self,
        *,
        capacity: int,
        max_waiting: int,
        max_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._running = 0
        self._num_waiting = 0
        # Accounts with waiting requests; all keys that ever called are the gateway's to keep.
        self._backlogged: dict[Account, None] = {}
        self._last_started: Account | None = None
        self._drain = DrainRate(clock)

    def configure(self, *, capacity: int, max_waiting: int, max_wait_s: float) -> None:
        """Set new bounds; what runs or waits now goes on doing so."""
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Set how many may run at once; beyond a lower bound none is stopped."""
        self._capacity = capacity
        self._grant()

    @property
    def state(self) -> QueueState:
        """How the queue stands now."""
        waiting = {account.name: len(account.waiting) for account in self._backlogged}
        # Within a key the first waiter is the oldest.
        since = min(
            (next(iter(account.waiting)).since_s for account in self._backlogged), default=None
        )
        oldest = 0.0 if since is None else self._clock() - since
        return QueueState(self._running, self._capacity, waiting, oldest)

    async def enter(self, account: Account) -> Ticket:
        """A place, at once or when the key's turn comes.

        Raises CapacityError when too many wait, or when the wait has lasted too long. Cancelling
        gives up the place in the queue.
        """
        if account in self._backlogged:
            self._grant()  # The key's own bound may have been raised.
        if account not in self._backlogged:
            self._lift(account)
            # Nobody who may run is passed over: while there is room, all others are at their bound.
            if self._running < self._capacity and account.may_run:
                return self._start(account, queued_s=0.0)
        self._make_room(account)
        return await self._wait(account)

    def _lift(self, account: Account) -> None:
        """Let no credit be saved up while a key has nothing waiting.

        A key whose requests still run may keep that of one answer: it sends its requests one by
        one, and would otherwise get as many turns as a key with longer answers, not as many tokens.
        """
        if self._backlogged:
            floor = min(other.virtual_time for other in self._backlogged)
            if account.num_running:
                floor -= max(other.mean_tokens / other.weight for other in self._backlogged)
        else:
            floor = 0.0 if self._last_started is None else self._last_started.virtual_time
        account.virtual_time = max(account.virtual_time, floor)

    def _start(self, account: Account, queued_s: float) -> Ticket:
        self._running += 1
        account.num_running += 1
        self._last_started = account
        return Ticket(self, account, queued_s)

    def _make_room(self, account: Account) -> None:
        """Refuse the newcomer, or the newest request of a key that holds more of a full queue.

        So no key fills the queue for the others. Source: longest queue drop (McKenney, "Stochastic
        fairness queueing", 1990).
        """
        if self._num_waiting < self._max_waiting:
            return
        fullest = max(self._backlogged, key=lambda other: other.backlog, default=None)
        own = (account.priority, (len(account.waiting) + 1) / account.weight)
        if fullest is None or fullest is account or fullest.backlog <= own:
            raise self._refusal(f"and {self._num_waiting} requests wait for them already")
        newest = next(reversed(fullest.waiting))
        self._forget(newest)
        newest.granted.set_exception(
            self._refusal("and requests of keys that hold less of the queue go first")
        )

    async def _wait(self, account: Account) -> Ticket:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(account, loop.create_future(), self._clock())
        account.waiting[waiter] = None
        self._backlogged[account] = None
        self._num_waiting += 1
        timer = loop.call_later(self._max_wait_s, self._expire, waiter, self._max_wait_s)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            granted = waiter.granted
            if waiter in account.waiting:
                self._forget(waiter)
            elif not granted.cancelled() and granted.exception() is None:
                granted.result().leave()  # The place came in the moment in which the client left.
            raise
        finally:
            timer.cancel()

    def _expire(self, waiter: _Waiter, max_wait_s: float) -> None:
        if not waiter.granted.done():
            self._forget(waiter)
            waiter.granted.set_exception(
                self._refusal(f"and none had room for this request within {max_wait_s:g} s")
            )

    def _forget(self, waiter: _Waiter) -> None:
        account = waiter.account
        del account.waiting[waiter]
        self._num_waiting -= 1
        if not account.waiting:
            del self._backlogged[account]

    def _leave(self, account: Account) -> None:
        self._running -= 1
        account.num_running -= 1
        self._drain.note()
        self._grant()

    def _grant(self) -> None:
        """Give free places away, each to the first request of the key whose turn it is."""
        while self._running < self._capacity and self._num_waiting:
            ready = [account for account in self._backlogged if account.may_run]
            if not ready:
                return
            account = min(ready, key=lambda each: (each.priority, each.virtual_time))
            waiter = next(iter(account.waiting))
            self._forget(waiter)
            if not waiter.granted.done():  # Else its client has left, and is about to be woken.
                ticket = self._start(account, self._clock() - waiter.since_s)
                waiter.granted.set_result(ticket)

    def _refusal(self, reason: str) -> CapacityError:
        return CapacityError(
            f"All replicas are busy, {reason}; please try again.",
            retry_after_s=self._drain.time_for(self._num_waiting + 1),
        )
