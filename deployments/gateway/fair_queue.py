"""Who may go to the replicas of a model, in which order, when there is not room for all.

The order is by class of priority, then by the virtual time of the keys, then by arrival. A key's
virtual time is advanced by the tokens that all threads of its requests generate, divided by its
weight: forking buys no place in the queue. Source: the virtual token counter (VTC) of Sheng et al.,
"Fairness in Serving Large Language Models" (arXiv 2401.00588), with thread steps for its cost and
the key's mean answer charged in advance, its variant with predicted lengths.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from apar_core.errors import CapacityError
from deployments.wire.errors import QueueTimeoutError, RateLimitError


@dataclass(slots=True, eq=False)
class Account:
    """One key in one model's queue.

    `virtual_time` counts tokens divided by `weight`. `max_running` bounds the key's requests that
    run at once. `held` says that the key has been at that bound since its virtual time was last
    compared with the others'.
    """

    name: str
    priority: int = 0
    weight: float = 1.0
    max_running: int | None = None
    virtual_time: float = 0.0
    num_running: int = 0
    mean_tokens: float = 0.0
    held: bool = False
    waiting: "dict[Waiter, None]" = field(default_factory=dict)  # in order of arrival

    @property
    def may_run(self) -> bool:
        """Whether the key's own bound leaves room for one more request."""
        return self.max_running is None or self.num_running < self.max_running

    @property
    def num_startable(self) -> int:
        """Waiting requests that would run if there were places without end."""
        if self.max_running is None:
            return len(self.waiting)
        return min(len(self.waiting), max(0, self.max_running - self.num_running))

    @property
    def backlog(self) -> tuple[int, float]:
        """How much the key's waiting requests deserve to be dropped: class, then number."""
        return self.priority, len(self.waiting) / self.weight

    @property
    def turn(self) -> tuple[int, float, float]:
        """The order among keys that wait: class, virtual time, then arrival."""
        return self.priority, self.virtual_time, next(iter(self.waiting)).since_s


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits; `granted` becomes its ticket."""

    account: Account
    granted: "asyncio.Future[Any]"
    since_s: float


_NUM_EVENTS = 64
_DEFAULT_S = 1.0
_MAX_S = 60.0


class DrainRate:
    """The rate of the last requests that ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_NUM_EVENTS)

    def note(self) -> None:
        """A request has ended now."""
        self._ends.append(self._clock())

    def time_for(self, num_requests: int) -> float:
        """Seconds in which so many requests will end, from 1 to 60; 1 while nothing is known."""
        if len(self._ends) < 2:
            return _DEFAULT_S
        # Up to now, not to the last end: a queue that has stopped must not look fast.
        span_s = self._clock() - self._ends[0]
        return min(max(span_s / (len(self._ends) - 1) * num_requests, _DEFAULT_S), _MAX_S)


# Weight of the newest answer in a mean.
_NEWEST = 0.1
# Least cost of a place: about one step of the engine.
_LEAST_TOKENS = 1


class Ticket:
    """A request's place at the replicas, from the moment it may go there until `leave`."""

    __slots__ = ("_account", "_expected", "_prepaid", "_queue", "_weight", "num_tokens", "queued_s")

    def __init__(self, queue: "FairQueue", account: Account, queued_s: float) -> None:
        self._queue = queue
        self._account = account
        # The key's weight may change before the end: a refund is of what was charged.
        self._weight = account.weight
        self.queued_s = queued_s
        self.num_tokens = 0
        # A burst would otherwise get every free place before its first token is charged.
        self._expected = queue._guess(account)
        self._prepaid = self._expected
        account.virtual_time += self._prepaid / self._weight

    def charge(self, num_tokens: int) -> None:
        """Advance the key's virtual time by tokens that were generated just now."""
        self.num_tokens += num_tokens
        paid = min(self._prepaid, num_tokens)
        self._prepaid -= paid
        self._account.virtual_time += (num_tokens - paid) / self._weight

    def leave(self, *, cost_is_known: bool = True) -> None:
        """Give the place back, when all tokens that are known of have been charged; once.

        A place costs `_LEAST_TOKENS` even where nothing was generated, as for `/tokenize` or a
        request that the replica refuses: a key whose places are free would go first forever.
        A request of unknown cost, because its client or its replica is gone, keeps what it was
        charged in advance: a key whose clients give up early must not come before the others.
        """
        account = self._account
        if cost_is_known:
            refund = self._prepaid - max(0, _LEAST_TOKENS - self.num_tokens)
            account.virtual_time -= refund / self._weight
            self._queue._learn(account, self.num_tokens)
        else:
            unpaid = self._queue._guess(account) - max(self._expected, self.num_tokens)
            account.virtual_time += max(0.0, unpaid) / self._weight
        self._queue._leave(account)

    def give_up(self) -> None:
        """Give the place back without having used it; once."""
        self._account.virtual_time -= self._prepaid / self._weight
        self._queue._leave(self._account)


@dataclass(frozen=True, slots=True)
class QueueState:
    """How a queue stands: `waiting` by the name of the key; `oldest_wait_s` is 0 without any.

    `num_startable` counts those of the waiting that more replicas could serve: the others wait for
    requests of their own key.
    """

    running: int
    capacity: int
    waiting: dict[str, int]
    num_startable: int
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
        # By class: the virtual times of two classes have nothing to do with each other.
        self._last_started: dict[int, Account] = {}
        self._mean_tokens = 0.0
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
        num_startable = sum(account.num_startable for account in self._backlogged)
        return QueueState(self._running, self._capacity, waiting, num_startable, oldest)

    async def enter(self, account: Account) -> Ticket:
        """A place, at once or when the key's turn comes.

        Raises CapacityError when too many wait, or when the wait has lasted too long, and
        RateLimitError where only the key's own bound stood in the way. Cancelling gives up the
        place in the queue.
        """
        if account in self._backlogged:
            self._grant()  # The key's own bound may have been raised.
        if account not in self._backlogged:
            self._lift(account, keeps_credit=account.num_running > 0)
            # Nobody who may run is passed over: while there is room, all others are at their bound.
            if self._running < self._capacity and account.may_run:
                return self._start(account, queued_s=0.0)
        self._make_room(account)
        return await self._wait(account)

    def _lift(self, account: Account, *, keeps_credit: bool) -> None:
        """Let no credit be saved up while a key has nothing waiting, or is at its own bound.

        A key whose requests still run may keep that of one answer: it sends its requests one by
        one, and would otherwise get as many turns as a key with longer answers, not as many tokens.
        """
        # A key at its bound falls behind all the time; who were set back to it would starve others.
        rivals = [
            other
            for other in self._backlogged
            if other.may_run
            and not other.held
            and other.priority == account.priority
            and other is not account
        ]
        if not rivals and account.priority in self._last_started:
            rivals = [self._last_started[account.priority]]
        if rivals:
            floor = min(other.virtual_time for other in rivals)
            if keeps_credit:
                floor -= max(other.mean_tokens / other.weight for other in rivals)
            account.virtual_time = max(account.virtual_time, floor)
        account.held = not account.may_run

    def _start(self, account: Account, queued_s: float) -> Ticket:
        self._running += 1
        account.num_running += 1
        account.held = account.held or not account.may_run
        self._last_started[account.priority] = account
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
            raise self._refusal(account, f"and {self._num_waiting} requests wait already")
        newest = next(reversed(fullest.waiting))
        self._forget(newest)
        if not newest.granted.done():  # Else its client has left, and is about to be woken.
            newest.granted.set_exception(
                self._refusal(fullest, "and requests of keys that hold less of the queue go first")
            )

    async def _wait(self, account: Account) -> Ticket:
        loop = asyncio.get_running_loop()
        waiter = Waiter(account, loop.create_future(), self._clock())
        account.waiting[waiter] = None
        self._backlogged[account] = None
        self._num_waiting += 1
        timer = loop.call_later(self._max_wait_s, self._expire, waiter, self._max_wait_s)
        try:
            ticket: Ticket = await waiter.granted
            return ticket
        except asyncio.CancelledError:
            granted = waiter.granted
            if waiter in account.waiting:
                self._forget(waiter)
            elif not granted.cancelled() and granted.exception() is None:
                granted.result().give_up()  # The place came in the moment in which the client left.
            raise
        finally:
            timer.cancel()

    def _expire(self, waiter: Waiter, max_wait_s: float) -> None:
        if not waiter.granted.done():
            self._forget(waiter)
            reason = f"and there was no room for this request within {max_wait_s:g} s"
            refusal = self._refusal(waiter.account, reason, QueueTimeoutError)
            waiter.granted.set_exception(refusal)

    def _forget(self, waiter: Waiter) -> None:
        account = waiter.account
        del account.waiting[waiter]
        self._num_waiting -= 1
        if not account.waiting:
            del self._backlogged[account]

    def _learn(self, account: Account, num_tokens: int) -> None:
        """Take an answer's cost into the means of its key and of all keys.

        Requests without output are ignored: they say nothing about the length of answers.
        """
        if num_tokens:
            account.mean_tokens = _newer_mean(account.mean_tokens or self._mean_tokens, num_tokens)
            self._mean_tokens = _newer_mean(self._mean_tokens, num_tokens)

    def _guess(self, account: Account) -> float:
        """Tokens of an answer that is not known yet, or that nobody counted; not less than 1."""
        return account.mean_tokens or self._mean_tokens or _LEAST_TOKENS

    def _leave(self, account: Account) -> None:
        self._running -= 1
        account.num_running -= 1
        self._drain.note()
        self._grant()

    def _grant(self) -> None:
        """Give free places away, each to the first request of the key whose turn it is."""
        for account in self._backlogged:
            if account.held and account.may_run:
                self._lift(account, keeps_credit=True)
        while self._running < self._capacity and self._num_waiting:
            ready = [account for account in self._backlogged if account.may_run]
            if not ready:
                return
            account = min(ready, key=lambda each: each.turn)
            waiter = next(iter(account.waiting))
            self._forget(waiter)
            if not waiter.granted.done():  # Else its client has left, and is about to be woken.
                ticket = self._start(account, self._clock() - waiter.since_s)
                waiter.granted.set_result(ticket)

    def _refusal(
        self, account: Account, reason: str, kind: type[CapacityError] = CapacityError
    ) -> CapacityError | RateLimitError:
        retry_after_s = self._drain.time_for(self._num_waiting + 1)
        if not account.may_run:
            return RateLimitError(
                f"{account.num_running} requests of key {account.name} run, as many as its "
                f"`max_threads` of {account.max_running} lets run at once, {reason}; please try "
                "again.",
                kind="threads",
                retry_after_s=retry_after_s,
            )
        return kind(
            f"All replicas are busy, {reason}; please try again.", retry_after_s=retry_after_s
        )


def _newer_mean(mean: float, num_tokens: int) -> float:
    """The mean of answers with one more answer; 0 stands for no answers yet.

    A short answer counts for less, in proportion to its tokens. To lower its mean a key must pay
    for as many tokens as with long answers, so tiny requests do not make the next burst cheap.
    """
    if not mean:
        return num_tokens
    return mean + _NEWEST * min(1.0, num_tokens / mean) * (num_tokens - mean)
