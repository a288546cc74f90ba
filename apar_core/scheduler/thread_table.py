"""The live threads of each request, and the limits that hold for all of them together.

Pure bookkeeping: it knows request ids and token ids, nothing of vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from apar_core.errors import TreeError
from apar_core.fork_parameters import ForkParameters
from apar_core.tree.thread_names import child_request_id

Child = TypeVar("Child")


@dataclass(slots=True, eq=False)
class ThreadGroup(Generic[Child]):
    """All threads of one request.

    `token_budget` is the request's `max_tokens`; `used_tokens` counts the text tokens of all
    threads against it, control and end tokens excepted. `deferred` holds children that wait for
    a place, the oldest first. `live` and `num_children` are keyed by engine request id.
    `arrival` is the request's priority, the lower the earlier, and the time when it came.
    """

    root_id: str
    parameters: ForkParameters
    token_budget: int
    arrival: tuple[int, float] = (0, 0.0)
    used_tokens: int = 0
    num_forks: int = 0
    closed: bool = False
    live: set[str] = field(default_factory=set)
    deferred: deque[Child] = field(default_factory=deque)
    num_children: dict[str, int] = field(default_factory=dict)

    @property
    def remaining_tokens(self) -> int:
        """Text tokens that the request may still generate."""
        return self.token_budget - self.used_tokens

    @property
    def exhausted(self) -> bool:
        """Whether the request has generated all the text that it may."""
        return self.used_tokens >= self.token_budget

    def may_fork(self) -> bool:
        """Whether one more thread may be opened, now or when there is a place for it."""
        return not (self.closed or self.exhausted or self.num_forks >= self.parameters.max_forks)

    def has_place(self) -> bool:
        """Whether one more thread may run beside those alive."""
        return not self.closed and len(self.live) < self.parameters.max_threads

    def goes_on_without(self, thread_id: str) -> bool:
        """Whether other threads of the request run, or will run, when this one has ended."""
        return not self.closed and (bool(self.deferred) or self.live != {thread_id})

    @property
    def has_startable(self) -> bool:
        """Whether a child waits that the request's own limit lets start."""
        return bool(self.deferred) and self.has_place()

    @property
    def order(self) -> tuple[int, float, str]:
        """Where the family stands among all: by priority, then by arrival."""
        return (*self.arrival, self.root_id)

    def next_child_id(self, parent_id: str) -> str:
        """Name the next child of a thread; refused forks take a name too."""
        ordinal = self.num_children.get(parent_id, 0)
        self.num_children[parent_id] = ordinal + 1
        return child_request_id(parent_id, ordinal)

    def within_budget(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens up to the last one that the budget allows."""
        remaining = self.remaining_tokens
        if len(token_ids) <= remaining:
            return list(token_ids)
        kept: list[int] = []
        for token_id in token_ids:
            if remaining <= 0:
                break
            kept.append(token_id)
            remaining -= not self.is_control(token_id)
        return kept

    def takes_as_text(self, token_id: int) -> bool:
        """Whether a token is text that the budget allows."""
        return self.used_tokens < self.token_budget and not self.is_control(token_id)

    def is_control(self, token_id: int) -> bool:
        """Whether a token is a fork or child token, and so no text."""
        return token_id in (self.parameters.fork_id, self.parameters.child_id)

    def count_text(self, token_ids: Sequence[int], *, ended: bool) -> None:
        """Charge the tokens that a thread generated; `ended` if the last one is its end token."""
        num_text = sum(not self.is_control(token_id) for token_id in token_ids)
        self.used_tokens += num_text - ended


class ThreadTable(Generic[Child]):
    """Finds a thread's group by its engine request id, while any thread of the group lives."""

    def __init__(self) -> None:
        self._group_of_thread: dict[str, ThreadGroup[Child]] = {}
        self._group_of_root: dict[str, ThreadGroup[Child]] = {}

    def open_group(
        self,
        root_id: str,
        parameters: ForkParameters,
        token_budget: int,
        *,
        arrival: tuple[int, float] = (0, 0.0),
    ) -> ThreadGroup[Child]:
        """Begin a request with its root thread. Raises TreeError if it has begun already."""
        if root_id in self._group_of_root:
            raise TreeError(f"request {root_id!r} was added twice")
        group: ThreadGroup[Child] = ThreadGroup(root_id, parameters, token_budget, arrival)
        self._group_of_root[root_id] = group
        self.add_thread(group, root_id)
        return group

    def add_thread(self, group: ThreadGroup[Child], thread_id: str) -> None:
        """Count a thread among the live ones of its group."""
        group.live.add(thread_id)
        self._group_of_thread[thread_id] = group

    def group(self, thread_id: str) -> ThreadGroup[Child] | None:
        """Group of a live thread; None if the request does not fork."""
        return self._group_of_thread.get(thread_id)

    def group_of_root(self, root_id: str) -> ThreadGroup[Child] | None:
        """Group of a request, also after its root thread has finished."""
        return self._group_of_root.get(root_id)

    def end_thread(self, thread_id: str) -> ThreadGroup[Child] | None:
        """Forget a finished thread and return its group; the last one takes the group along."""
        group = self._group_of_thread.pop(thread_id, None)
        if group is None:
            return None
        group.live.discard(thread_id)
        group.num_children.pop(thread_id, None)
        self.drop_if_ended(group)
        return group

    def drop_if_ended(self, group: ThreadGroup[Child]) -> None:
        """Forget a group that has no thread left, alive or deferred."""
        if not group.live and not group.deferred:
            self._group_of_root.pop(group.root_id, None)

    @property
    def groups(self) -> list[ThreadGroup[Child]]:
        """Every group with a thread alive or deferred."""
        return list(self._group_of_root.values())

    @property
    def num_live(self) -> int:
        """Threads alive in all groups together."""
        return len(self._group_of_thread)
