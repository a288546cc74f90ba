"""Which fork starts next: caps on threads, then the fork policy, families in order of arrival."""

from __future__ import annotations
import heapq
import itertools
from collections import Counter
from typing import Generic, TypeVar
from apar_core.scheduler.thread_table import ThreadGroup
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar
from apar_core.scheduler.fork_policy import ForkPolicy
from apar_core.scheduler.step_time import BatchView


Child = TypeVar("Child")

Order = tuple[int, float, str]
Key = str | None


class ForkQueue(Generic[Child]):
    """Families with a child that their own limit lets start: a heap of them for each API key.

    A key whose threads have reached its limit is set aside until one of them ends. Requests
    without a key share one heap without a limit.
    """

    def __init__(self) -> None:
        self.key_threads: Counter[str] = Counter()
        self._key_of_thread: dict[str, str] = {}
        # The number in the middle of an entry keeps the heaps from comparing what stands behind it.
        self._numbers = itertools.count()
        self._families: dict[Key, list[tuple[Order, int, ThreadGroup[Child]]]] = {}
        self._queued: set[ThreadGroup[Child]] = set()
        # Keys by their first family; an entry that `_standing` does not confirm is out of date.
        self._keys: list[tuple[Order, int, Key]] = []
        self._standing: dict[Key, Order] = {}

    def thread_began(self, thread_id: str, key: Key) -> None:
        """Count a thread, forked or not, among those of its key."""
        if key is not None:
            self._key_of_thread[thread_id] = key
            self.key_threads[key] += 1

    def thread_ended(self, thread_id: str) -> None:
        """Count a thread no more."""
        key = self._key_of_thread.pop(thread_id, None)
        if key is None:
            return
        self.key_threads[key] -= 1
        if self.key_threads[key] == 0:
            del self.key_threads[key]
        self._enter(key)

    def offer(self, group: ThreadGroup[Child]) -> None:
        """Take a family up, if it has a child that may start; again whenever a thread has ended."""
        if group in self._queued or not group.has_startable:
            return
        key = group.parameters.key
        self._queued.add(group)
        entry = (group.order, next(self._numbers), group)
        heapq.heappush(self._families.setdefault(key, []), entry)
        self._enter(key)

    def first(self) -> ThreadGroup[Child] | None:
        """The oldest family with a child that the limits of request and key let start."""
        while self._keys:
            order, _, key = self._keys[0]
            group = self._first_of(key)
            stands = self._standing.get(key) == order
            if stands and group is not None and group.order == order:
                if not self.key_is_full(group):
                    return group
                group = None
            heapq.heappop(self._keys)
            if stands:
                del self._standing[key]
                if group is not None:
                    self._enter(key)
        return None

    def key_is_full(self, group: ThreadGroup[Child]) -> bool:
        """Whether the family's key has as many threads alive as it may."""
        key, limit = group.parameters.key, group.parameters.key_max_threads
        return key is not None and limit is not None and self.key_threads[key] >= limit

    def _enter(self, key: Key) -> None:
        """Let a key stand where its first family stands."""
        group = self._first_of(key)
        if group is not None and self._standing.get(key) != group.order:
            self._standing[key] = group.order
            heapq.heappush(self._keys, (group.order, next(self._numbers), key))

    def _first_of(self, key: Key) -> ThreadGroup[Child] | None:
        """A key's first family, once those are dropped that have nothing to start any more."""
        families = self._families.get(key, [])
        while families and not families[0][-1].has_startable:
            self._queued.discard(heapq.heappop(families)[-1])
        if not families:
            self._families.pop(key, None)
            return None
        return families[0][-1]


Child = TypeVar("Child")

Reason = Literal["request", "key", "replica", "policy"]
"""What holds a fork back: a cap of its request, of its key or of the replica, or the policy."""
REASONS: tuple[Reason, ...] = ("request", "key", "replica", "policy")


@dataclass(slots=True)
class AdmissionCounters:
    """What became of the forks since the engine started.

    `accepted` ones started in the step of their fork. `delayed` ones had to wait, by what first
    held them back; all start later, unless their request ends before. `refused` ones opened no
    thread: their request had used up its forks or its tokens, or the context was full.
    """

    accepted: int = 0
    delayed: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    refused: int = 0


class ForkAdmission(Generic[Child]):
    """Holds forks back and lets them go.

    `num_tokens` tells how many tokens a child attends to when it starts. A family that has no
    thread alive is not held back by anything: see `ForkMixin`.
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
        # What held back the first family that request and key would let go on.
        self._held_by: Reason = "policy"
        self._new: Counter[ThreadGroup[Child]] = Counter()

    def wait(self, group: ThreadGroup[Child], child: Child) -> None:
        """Let a fork wait behind those of its family."""
        group.deferred.append(child)
        self._new[group] += 1
        self.queue.offer(group)

    def closed(self, group: ThreadGroup[Child]) -> None:
        """Forget what is new of a family that will start no child any more."""
        self._new.pop(group, None)

    def next(self, num_threads: int, batch: BatchView) -> tuple[ThreadGroup[Child], Child] | None:
        """Take the fork that may start now beside `num_threads` and their batch; None if none may.

        What holds the oldest family back, other than a cap of its own, holds all back.
        """
        group = self.queue.first()
        if group is None:
            return None
        if self._max_replica_threads is not None and num_threads >= self._max_replica_threads:
            self._held_by = "replica"
            return None
        if not self.policy.admits(batch, extra_attended=self._num_tokens(group.deferred[0])):
            self._held_by = "policy"
            return None
        return group, group.deferred.popleft()

    def settle(self) -> None:
        """Count the new forks, once all that may start have been taken."""
        for group, num_new in self._new.items():
            # The newest stand last, so those that started are the ones that wait no more.
            num_waiting = min(num_new, len(group.deferred))
            self.counters.accepted += num_new - num_waiting
            if num_waiting:
                self.counters.delayed[self._reason(group)] += num_waiting
        self._new.clear()

    def waiting_by_reason(self, groups: Iterable[ThreadGroup[Child]]) -> dict[Reason, int]:
        """How many children of these families wait at this moment, by what holds them back."""
        waiting = dict.fromkeys(REASONS, 0)
        for group in groups:
            if group.deferred:
                waiting[self._reason(group)] += len(group.deferred)
        return waiting

    def _reason(self, group: ThreadGroup[Child]) -> Reason:
        if not group.has_place():
            return "request"
        return "key" if self.queue.key_is_full(group) else self._held_by
