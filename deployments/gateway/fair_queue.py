"""Weighted fair queue in front of one model's replicas.

Requests are served by priority class, then by the virtual time of their key, then by arrival. A
key's virtual time advances by the prompt tokens of its requests and by the generated tokens of all
their threads, divided by its weight. Forking therefore gains no advantage in the queue. Source: the
virtual token counter (VTC) of Sheng et al., "Fairness in Serving Large Language Models" (arXiv
2401.00588), in its variant with predicted lengths: generated tokens are thread steps, and the key's
mean answer is charged in advance.

A request takes one slot at the replicas per sequence: answers times prompts. All its sequences
start together. While the next request waits for enough slots, no other request takes them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from apar_core.errors import CapacityError
from deployments.config.keys import MAX_PRIORITY
from deployments.gateway.accounts import ONE, Account, Accounts, QueuedKey, Size, Waiter, has_room
from deployments.wire.errors import DeadlineError, QueueTimeoutError, RateLimitError

LINE_PRIORITY = MAX_PRIORITY + 1
"""Priority of the lines of batches, behind every priority that a request may ask for."""
# Weight of the newest answer in a mean.
_NEWEST = 0.1
# Cost of a prompt token in generated tokens: the paper's weights are 1 and 2.
_PROMPT_COST = 0.5
# Minimum cost of a slot: about one step of the engine.
_MIN_TOKENS = 1
# Requests over which the drain rate is measured.
_NUM_ENDS = 64
# Minimum number of ended requests for a forecast of the wait.
_MIN_ENDS = 8
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


class Due(NamedTuple):
    """The deadline for leaving the queue: the option that sets it, and the seconds left."""

    option: str
    left_s: float


class DrainRate:
    """Rate at which requests end, measured over the last ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_NUM_ENDS)
        self._backlog_ends: deque[float] = deque(maxlen=_NUM_ENDS)

    def note(self) -> None:
        """Note the end of a request."""
        self._ends.append(self._clock())
        self._backlog_ends.append(self._ends[-1])

    def time_for(self, num_requests: int) -> float:
        """Return the seconds until `num_requests` have ended, clamped to 1 to 60; 1 if unknown."""
        if len(self._ends) < 2:
            return _MIN_RETRY_S
        # Measured until now, not until the last end: a stalled queue must not look fast.
        span_s = self._clock() - self._ends[0]
        return min(max(span_s / (len(self._ends) - 1) * num_requests, _MIN_RETRY_S), _MAX_RETRY_S)

    def queue_is_empty(self) -> None:
        """Forget how fast the backlog drained: the next one may come after an idle time."""
        self._backlog_ends.clear()

    def wait_s(self, num_ahead: int) -> float:
        """Return the seconds until `num_ahead` requests have ended; 0 while unknown.

        Measured over the requests that have ended since the queue was last empty.
        """
        ends = self._backlog_ends
        if len(ends) < _MIN_ENDS:
            return 0.0
        return (self._clock() - ends[0]) / (len(ends) - 1) * num_ahead


class Ticket:
    """A request's slots at the replicas, held until `leave` or `give_up`."""

    __slots__ = (
        "_account",
        "_expected",
        "_prepaid",
        "_prompt_tokens",
        "_queue",
        "_size",
        "_weight",
        "num_tokens",
        "queued_s",
    )

    def __init__(self, queue: "FairQueue", account: Account, size: Size, queued_s: float) -> None:
        self._queue = queue
        self._account = account
        self._size = size
        # The key's weight may change meanwhile; a refund uses the weight of the charge.
        self._weight = account.key.weight
        self.queued_s = queued_s
        self.num_tokens = 0
        # Without this advance, a burst would take every free slot before any token is charged.
        self._expected = queue._guess(account) * size.num_sequences
        self._prepaid = self._expected
        self._prompt_tokens = 0
        account.virtual_time += self._prepaid / self._weight
        self.charge_prompt(size.prompt_tokens)

    def charge_prompt(self, num_tokens: int) -> None:
        """Charge the tokens of the request's prompts, replacing the previous charge."""
        unpaid = (num_tokens - self._prompt_tokens) * _PROMPT_COST
        self._prompt_tokens = num_tokens
        self._account.virtual_time += unpaid / self._weight

    def charge(self, num_tokens: int) -> None:
        """Advance the key's virtual time by newly generated tokens."""
        self.num_tokens += num_tokens
        self._queue.heard_s = self._queue._clock()
        paid = min(self._prepaid, num_tokens)
        self._prepaid -= paid
        self._account.virtual_time += (num_tokens - paid) / self._weight

    def leave(self, *, cost_is_known: bool = True) -> None:
        """Release the slots; call once, after all known tokens have been charged.

        A slot costs at least `_MIN_TOKENS`, even if nothing was generated (`/tokenize`, or a
        request that the replica refuses): a key whose requests cost nothing would always go first.
        The cost is unknown if the client or the replica is gone. The advance charge then stays: a
        key must not gain from clients that give up early.
        """
        account, num_sequences = self._account, self._size.num_sequences
        if cost_is_known:
            refund = self._prepaid - max(0, _MIN_TOKENS * num_sequences - self.num_tokens)
            account.virtual_time -= refund / self._weight
            self._queue._learn(account, self.num_tokens / num_sequences)
            account.mean_prompt = _newer_mean(
                account.mean_prompt, self._prompt_tokens * _PROMPT_COST
            )
        else:
            guess = self._queue._guess(account) * num_sequences
            unpaid = guess - max(self._expected, self.num_tokens)
            account.virtual_time += max(0.0, unpaid) / self._weight
        self._queue._leave(account, self._size)

    def give_up(self) -> None:
        """Release unused slots with a full refund; call once."""
        self._account.virtual_time -= self._prepaid / self._weight
        self.charge_prompt(0)
        self._queue._leave(self._account, self._size)


@dataclass(frozen=True, slots=True)
class QueueState:
    """State of a queue; `waiting` counts requests by the name of their key.

    `num_sequences` counts the sequences of the running requests. `num_startable` counts the waiting
    sequences that more replicas could serve. The others wait for running requests of their own key.
    `num_lines` counts those of the waiting requests that are lines of batches.
    """

    running: int
    num_sequences: int
    waiting: dict[str, int]
    num_startable: int
    num_lines: int = 0


class FairQueue:
    """Admits requests to the replicas of one model in fair order.

    Belongs to one event loop. At most `capacity` sequences run at once. While there is room, a
    request waits only if its key is at its own cap, or if it is behind a request that needs
    more room.
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
        self._accounts = Accounts()
        self._mean_tokens = 0.0
        self.heard_s = float("-inf")
        """Time of the last charge, by the clock."""
        self._drain = DrainRate(clock)

    def configure(self, *, capacity: int, max_waiting: int, max_wait_s: float) -> None:
        """Set new limits; running and waiting requests continue."""
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Set how many sequences may run at once; running ones are never stopped."""
        self._capacity = capacity
        self._grant()

    def has_room(self, size: Size) -> bool:
        """Return whether the replicas have enough free slots for a request."""
        return has_room(self._accounts.num_sequences, self._capacity, size)

    @property
    def state(self) -> QueueState:
        """The current state."""
        waiting = {key.name: key.num_waiting for key in self._accounts.backlogged}
        num_startable = sum(key.num_startable for key in self._accounts.backlogged)
        running, num_sequences = self._accounts.num_running, self._accounts.num_sequences
        num_lines = self._accounts.num_waiting_of(LINE_PRIORITY)
        return QueueState(running, num_sequences, waiting, num_startable, num_lines)

    @property
    def keys(self) -> Iterable[QueuedKey]:
        """The keys that have requests here, or have had some in a class that is still busy."""
        return self._accounts.keys.values()

    def account_of(self, name: str, priority: int = 0) -> Account:
        """Return the account of a key and priority, for a request that enters at once.

        The caller must not keep it: accounts are forgotten once they are idle.
        """
        return self._accounts.of(name, priority)

    async def enter(
        self,
        account: Account,
        due: Due | None = None,
        max_wait_s: float | None = None,
        size: Size = ONE,
    ) -> Ticket:
        """Wait for a request's slots and return its ticket; `max_wait_s` overrides the default.

        Raises CapacityError if the queue is full, and QueueTimeoutError if the wait takes too long.
        A key at its own cap gets RateLimitError in both cases. Raises DeadlineError if the request
        has not left the queue when it is `due`, or certainly will not have. Cancelling the call
        leaves the queue.
        """
        try:
            return await self._admitted(account, due, max_wait_s, size)
        except BaseException:
            self._grant()  # Others may have waited behind a request of many sequences.
            self._accounts.forget_idle(account.priority)
            raise

    async def _admitted(
        self, account: Account, due: Due | None, max_wait_s: float | None, size: Size
    ) -> Ticket:
        if due is not None and due.left_s <= 0:
            raise self._late(
                account, size, due.option, "it had passed when the request arrived here"
            )
        if account.waiting:
            self._grant()  # The key's cap may have been raised.
        if not account.waiting:
            self._lift(account, keeps_credit=account.num_running > 0)
            if not account.key.num_waiting and account.key.has_room(size) and self.has_room(size):
                # A waiting key at its cap blocks nobody; one below its cap waits for more slots.
                others = any(key.may_run for key in self._accounts.backlogged)
                if not others:
                    return self._start(account, size, queued_s=0.0)
        if due is not None:
            self._check_wait(account, size, due)
        self._make_room(account, size)
        return await self._wait(
            account, size, due, self._max_wait_s if max_wait_s is None else max_wait_s
        )

    def _check_wait(self, account: Account, size: Size, due: Due) -> None:
        """Raise DeadlineError if the requests that certainly go first take too long.

        These are the waiting requests of the account and of more urgent classes. Which others go
        first depends on what the keys use meanwhile.
        """
        num_ahead = len(account.waiting) + self._accounts.num_more_urgent(account.priority)
        wait_s = self._drain.wait_s(num_ahead + 1)
        if wait_s > due.left_s:
            raise self._late(
                account,
                size,
                due.option,
                f"{num_ahead} requests go first, which takes about {wait_s:.1f} s, and "
                f"{due.left_s:.1f} s are left",
            )

    def _lift(self, account: Account, *, keeps_credit: bool) -> None:
        """Raise a key's virtual time to that of its rivals.

        A key thus saves up no credit while it has nothing waiting or is at its cap. A key whose
        requests still run keeps the credit of one answer: if it sends its requests one by one, it
        would otherwise get as many turns as a key with longer answers, but not as many tokens.
        """
        # Without keys at their caps: they constantly fall behind, and a new key that started at
        # their level would starve others.
        peers, key = account.peers, account.key
        rivals = [
            other
            for other in peers.backlogged
            if other.key.may_run and not other.held and other is not account
        ]
        if not rivals and peers.last_started is not None:
            rivals = [peers.last_started]
        if rivals:
            floor = min(other.virtual_time for other in rivals)
            if keeps_credit:
                floor -= max(
                    (other.mean_tokens + other.mean_prompt) / other.key.weight for other in rivals
                )
            account.virtual_time = max(account.virtual_time, floor)
        account.lifted_at = key.times_full if key.may_run else None

    def _start(self, account: Account, size: Size, queued_s: float) -> Ticket:
        self._accounts.start(account, size)
        return Ticket(self, account, size, queued_s)

    def _make_room(self, account: Account, size: Size) -> None:
        """Make room in a full queue by dropping the newest request of the key that fills it most.

        Raises the refusal if that is the account itself. Source: longest queue drop (McKenney,
        "Stochastic fairness queueing", 1990).
        """
        num_waiting = self._accounts.num_waiting
        if num_waiting < self._max_waiting:
            return
        # Only from the least urgent waiting class: more urgent ones lose nothing to it.
        fullest = max(self._accounts.least_urgent, key=lambda other: other.backlog, default=None)
        own = (account.priority, (len(account.waiting) + 1) / account.key.weight)
        if fullest is None or fullest is account or (fullest.priority, fullest.backlog) <= own:
            raise self._refusal(account, size, f"and {num_waiting} requests wait already")
        newest = next(reversed(fullest.waiting))
        self._accounts.stop_waiting(newest)
        if not newest.granted.done():  # Otherwise its client has left.
            newest.granted.set_exception(
                self._refusal(fullest, newest.size, "and keys that hold less of the queue go first")
            )

    async def _wait(
        self, account: Account, size: Size, due: Due | None, max_wait_s: float
    ) -> Ticket:
        loop = asyncio.get_running_loop()
        waiter = Waiter(account, size, loop.create_future(), self._clock())
        self._accounts.wait(waiter)
        if self.has_room(size):
            self._grant()  # It may go before a request that waits for more slots.
        if due is not None and due.left_s < max_wait_s:
            timer = loop.call_later(due.left_s, self._pass_deadline, waiter, due)
        else:
            timer = loop.call_later(max_wait_s, self._expire, waiter, max_wait_s)
        try:
            ticket: Ticket = await waiter.granted
        except asyncio.CancelledError:
            granted = waiter.granted
            if waiter in account.waiting:
                self._accounts.stop_waiting(waiter)
            elif not granted.cancelled() and granted.exception() is None:
                granted.result().give_up()  # The client left just as its turn came.
            raise
        else:
            return ticket
        finally:
            timer.cancel()

    def _expire(self, waiter: Waiter, max_wait_s: float) -> None:
        if not waiter.granted.done():
            self._accounts.stop_waiting(waiter)
            reason = f"and there was no room for this request within {max_wait_s:g} s"
            refusal = self._refusal(waiter.account, waiter.size, reason, QueueTimeoutError)
            waiter.granted.set_exception(refusal)

    def _pass_deadline(self, waiter: Waiter, due: Due) -> None:
        if not waiter.granted.done():
            self._accounts.stop_waiting(waiter)
            reason = f"it passed after {due.left_s:.3g} s in the queue"
            waiter.granted.set_exception(
                self._late(waiter.account, waiter.size, due.option, reason)
            )

    def _late(self, account: Account, size: Size, option: str, reason: str) -> DeadlineError:
        return DeadlineError(
            option,
            reason,
            retry_after_s=self._drain.time_for(self._accounts.num_waiting + 1),
            key_is_full=not account.key.has_room(size),
        )

    def _learn(self, account: Account, num_tokens: float) -> None:
        """Update the mean sequence lengths of the account and of all keys.

        Requests without output are ignored: they say nothing about the length of answers.
        """
        if num_tokens:
            account.mean_tokens = _newer_mean(account.mean_tokens or self._mean_tokens, num_tokens)
            self._mean_tokens = _newer_mean(self._mean_tokens, num_tokens)

    def _guess(self, account: Account) -> float:
        """Return the expected tokens of a sequence of unknown length, at least 1."""
        return account.mean_tokens or self._mean_tokens or _MIN_TOKENS

    def _leave(self, account: Account, size: Size) -> None:
        self._accounts.end(account, size)
        self._drain.note()
        if not self._accounts.num_waiting:
            self._drain.queue_is_empty()
        self._grant()
        self._accounts.forget_idle(account.priority)

    def _grant(self) -> None:
        """Grant free slots, request by request, to the account whose turn it is."""
        for key in self._accounts.backlogged:
            self._lift_held(key)
        while self._accounts.num_sequences < self._capacity:
            ready = [key.first for key in self._accounts.backlogged if key.may_run]
            if not ready:
                return
            account = min(ready, key=lambda each: each.turn)
            waiter = account.next
            if not self.has_room(waiter.size):
                return
            self._accounts.stop_waiting(waiter)
            if not waiter.granted.done():  # Otherwise its client has left.
                ticket = self._start(account, waiter.size, self._clock() - waiter.since_s)
                waiter.granted.set_result(ticket)
            if account.key.num_waiting:
                self._lift_held(account.key)

    def _lift_held(self, key: QueuedKey) -> None:
        """Raise the virtual time with which a key competes, if it has been at its cap."""
        if key.may_run and key.first.held:
            self._lift(key.first, keeps_credit=True)

    def _refusal(
        self,
        account: Account,
        size: Size,
        reason: str,
        kind: type[CapacityError] = CapacityError,
    ) -> CapacityError | RateLimitError:
        retry_after_s = self._drain.time_for(self._accounts.num_waiting + 1)
        key = account.key
        if not key.has_room(size):
            cap = key.cap or key.max_running
            here = "" if cap == key.max_running else ", together with those of other gateways"
            return RateLimitError(
                f"Key {key.name} has {key.num_running} running sequences{here}, and its "
                f"`max_threads` of {cap} has no room for {size.num_sequences} more, {reason}; "
                "please try again.",
                kind="threads",
                retry_after_s=retry_after_s,
            )
        return kind(
            f"All replicas are busy, {reason}; please try again.", retry_after_s=retry_after_s
        )


def _newer_mean(mean: float, num_tokens: float) -> float:
    """Return the moving mean with one more answer; a mean of 0 means no answers yet.

    A short answer counts for less, in proportion to its tokens. Lowering the mean takes as many
    tokens with short answers as with long ones, so tiny requests do not make the next burst cheap.
    """
    if not mean:
        return num_tokens
    return mean + _NEWEST * min(1.0, num_tokens / mean) * (num_tokens - mean)
