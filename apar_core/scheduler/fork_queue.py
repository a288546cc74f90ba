"""Forks that wait, in the order in which their families came.

Pure bookkeeping. Whatever changes (a fork waits, a thread begins or ends) costs time logarithmic
in the number of waiting families; nothing looks through all of them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from typing import Generic, TypeVar

from apar_core.scheduler.thread_table import ThreadGroup

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
