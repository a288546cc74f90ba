"""Decide when a fork starts: limits of request, API key and replica, then the fork policy.

`ForkMixin` (in `fork_scheduler.py`) decides whether a fork opens a thread at all, and queues the
child here. At the end of each step it takes the children that may start:

- Requests are considered in order of priority, then deadline (none is last), then arrival; the
  children of one request, oldest first.
- A request at its `max_threads`, or whose key is at its limit, does not block other requests.
- The replica's limit and the policy (`fork_policy.py`) block all requests.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from apar_core.scheduler.fork_policy import ForkPolicy
from apar_core.scheduler.thread_table import ThreadGroup
from apar_core.step_costs.costs import StepBatch

Child = TypeVar("Child")

Order = tuple[int, float, float, str]
Key = str | None

Reason = Literal["request", "key", "replica", "policy"]
"""Reason that delays a fork: the limit of its request, key or replica, or the policy."""
REASONS: tuple[Reason, ...] = ("request", "key", "replica", "policy")


@dataclass(slots=True)
class AdmissionCounters:
    """Forks since the engine started.

    accepted: started in the step of their fork.
    delayed: had to wait, by their first reason; they start later unless their request ends before.
    refused: opened no thread, as their request had used up its forks or its tokens, the context was
        full, or the threads of a list would have lowered the throughput.
    """

    accepted: int = 0
    delayed: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    refused: int = 0


class ForkAdmission(Generic[Child]):
    """Queue of waiting children with the checks that let them start.

    `num_tokens` returns how many tokens a child attends to when it starts. A request without a live
    thread skips the checks: see `ForkMixin._free_request`.
    """

    def __init__(
        self,
        max_replica_threads: int | None,
        policy: ForkPolicy,
        num_tokens: Callable[[Child], int],
    ) -> None:
        self.counters = AdmissionCounters()
        self.policy = policy
        self.queue: ForkQueue[Child] = ForkQueue()
        self._max_replica_threads = max_replica_threads
        self._num_tokens = num_tokens
        # What blocks the first request whose own and whose key's limit have room.
        self._blocked_by: Reason = "policy"
        # Children since the last `settle`, by request.
        self._new: Counter[ThreadGroup[Child]] = Counter()

    @property
    def num_new(self) -> int:
        """Children queued since the last `settle`."""
        return sum(self._new.values())

    def wait(self, group: ThreadGroup[Child], child: Child) -> None:
        """Queue a child after the others of its request."""
        group.deferred.append(child)
        self._new[group] += 1
        self.queue.offer(group)

    def closed(self, group: ThreadGroup[Child]) -> None:
        """Forget the new children of a request that starts no more."""
        self._new.pop(group, None)

    def has_room(self, num_threads: int) -> bool:
        """Return whether the replica's limit allows one more live thread."""
        return self._max_replica_threads is None or num_threads < self._max_replica_threads

    def next(
        self,
        num_threads: int,
        batch: StepBatch,
        num_saved: Callable[[ThreadGroup[Child], Child], int] = lambda _group, _child: 0,
        *,
        limit_s: float | None = None,
    ) -> tuple[ThreadGroup[Child], Child] | None:
        """Remove and return the next child that may start; None if none may.

        `num_threads` are the replica's live threads, `batch` what they will compute. `num_saved`
        returns how many of a child's attended tokens its siblings read for it. `limit_s`: the
        policy's limit on the time of a step, if it is not its own.
        """
        group = self.queue.first()
        if group is None:
            return None
        if not self.has_room(num_threads):
            self._blocked_by = "replica"
            return None
        child = group.deferred[0]
        grown = batch.grown(
            rows=1,
            attended_tokens=self._num_tokens(child),
            saved_tokens=num_saved(group, child),
        )
        if not self.policy.admits(grown, limit_s):
            self._blocked_by = "policy"
            return None
        return group, group.deferred.popleft()

    def settle(self) -> None:
        """Count the new children as accepted or delayed, after all that may start have started."""
        for group, num_new in self._new.items():
            # New children are last in the queue, so those that started are those not waiting.
            num_waiting = min(num_new, len(group.deferred))
            self.counters.accepted += num_new - num_waiting
            if num_waiting:
                self.counters.delayed[self._reason(group)] += num_waiting
        self._new.clear()

    def waiting_by_reason(self, groups: Iterable[ThreadGroup[Child]]) -> dict[Reason, int]:
        """Return how many children of these requests wait now, by reason."""
        waiting = dict.fromkeys(REASONS, 0)
        for group in groups:
            if group.deferred:
                waiting[self._reason(group)] += len(group.deferred)
        return waiting

    def _reason(self, group: ThreadGroup[Child]) -> Reason:
        if not group.has_place():
            return "request"
        return "key" if self.queue.key_is_full(group) else self._blocked_by


class ForkQueue(Generic[Child]):
    """Requests with a child that their own limit lets start, in order, with a limit per API key.

    There is a heap of requests for each key. A key at its limit is set aside until one of its
    threads ends. Requests without a key share one heap without a limit. Every operation takes time
    logarithmic in the number of waiting requests.
    """

    def __init__(self) -> None:
        self.key_threads: Counter[str] = Counter()
        self._key_of_thread: dict[str, str] = {}
        # Unique number in each heap entry, so that heaps never compare what follows it.
        self._numbers = itertools.count()
        self._groups: dict[Key, list[tuple[Order, int, ThreadGroup[Child]]]] = {}
        self._queued: set[ThreadGroup[Child]] = set()
        # Keys by the order of their first request; an entry is outdated unless `_order_of_key`
        # confirms it.
        self._keys: list[tuple[Order, int, Key]] = []
        self._order_of_key: dict[Key, Order] = {}

    def thread_began(self, thread_id: str, key: Key) -> None:
        """Count a thread, forked or not, to its key."""
        if key is not None:
            self._key_of_thread[thread_id] = key
            self.key_threads[key] += 1

    def thread_ended(self, thread_id: str) -> None:
        """Remove a thread from its key's count."""
        key = self._key_of_thread.pop(thread_id, None)
        if key is None:
            return
        self.key_threads[key] -= 1
        if self.key_threads[key] == 0:
            del self.key_threads[key]
        self._enter(key)

    def offer(self, group: ThreadGroup[Child]) -> None:
        """Queue a request if a child of it may start; call again after one of its threads ended."""
        if group in self._queued or not group.has_startable:
            return
        key = group.parameters.key
        self._queued.add(group)
        entry = (group.order, next(self._numbers), group)
        heapq.heappush(self._groups.setdefault(key, []), entry)
        self._enter(key)

    def first(self) -> ThreadGroup[Child] | None:
        """Return the first request with a child that the limits of request and key let start."""
        while self._keys:
            order, _, key = self._keys[0]
            group = self._first_of(key)
            is_current = self._order_of_key.get(key) == order
            if is_current and group is not None and group.order == order:
                if not self.key_is_full(group):
                    return group
                group = None
            heapq.heappop(self._keys)
            if is_current:
                del self._order_of_key[key]
                if group is not None:
                    self._enter(key)
        return None

    def key_is_full(self, group: ThreadGroup[Child]) -> bool:
        """Return whether the request's key has as many live threads as it may."""
        key, limit = group.parameters.key, group.parameters.key_max_threads
        return key is not None and limit is not None and self.key_threads[key] >= limit

    def _enter(self, key: Key) -> None:
        """Give a key the place of its first request."""
        group = self._first_of(key)
        if group is not None and self._order_of_key.get(key) != group.order:
            self._order_of_key[key] = group.order
            heapq.heappush(self._keys, (group.order, next(self._numbers), key))

    def _first_of(self, key: Key) -> ThreadGroup[Child] | None:
        """Return a key's first request, after dropping those without a startable child."""
        groups = self._groups.get(key, [])
        while groups and not groups[0][-1].has_startable:
            self._queued.discard(heapq.heappop(groups)[-1])
        if not groups:
            self._groups.pop(key, None)
            return None
        return groups[0][-1]
