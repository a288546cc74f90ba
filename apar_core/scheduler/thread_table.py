"""Live threads of each request, and the limits that they share.

Pure bookkeeping with request ids and token ids; nothing here knows vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from apar_core.errors import TreeError
from apar_core.fork_parameters import ForkParameters
from apar_core.formats.blocks import OpenBlock, OpenForks
from apar_core.formats.lists import ListReader, ListRules
from apar_core.formats.rules import JoinRules
from apar_core.tree.thread_names import child_request_id

Child = TypeVar("Child")

DEADLINE_HORIZON_S = 60.0
"""Longest deadline that puts a request's forks before those of others; without one, it is due then.

Otherwise a key could put its forks before all others by a deadline that is never reached.
"""


@dataclass(slots=True)
class TextPlace:
    """Position of a thread's own text in its sequence, if threads wait for their children.

    own_start: tokens before its own text. segment_start: tokens before what it has generated since
        its last join. num_generated: tokens that it has generated before that join.
    """

    own_start: int
    segment_start: int
    num_generated: int = 0

    @property
    def has_joined(self) -> bool:
        """Whether the thread continues after a joined text."""
        return self.segment_start > self.own_start


@dataclass(slots=True, eq=False)
class WaitingParent(Generic[Child]):
    """A thread that waits until its children have ended.

    request: its last engine request, which has ended.
    child_ids: engine request ids of its children. texts: what those that have ended have written.
    num_held: tokens whose KV blocks are kept for it.
    in_flight_tokens: tokens of its request in steps whose output has not arrived.
    """

    request: Child
    block: OpenBlock
    child_ids: list[str]
    texts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_held: int = 0
    in_flight_tokens: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all children have ended."""
        return len(self.texts) == len(self.child_ids)


@dataclass(slots=True, eq=False)
class ThreadGroup(Generic[Child]):
    """All threads of one request.

    token_budget: the request's `max_tokens`, or a multiple of it (`ListRules.work_factor`).
    arrival: the request's priority (lower goes first) and arrival time.
    used_tokens: text tokens of all threads, without control and end tokens.
    closed: no further thread starts.
    live: engine request ids of the live threads.
    deferred: children that wait for their start, oldest first.
    num_children: forks of each live thread, by its engine request id.
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
    _control_ids: Container[int] = field(init=False)

    def __post_init__(self) -> None:
        self._control_ids = self._tokens_without_text()

    def _tokens_without_text(self) -> Container[int]:
        return (*self.parameters.control_ids, *self.parameters.call_ids)

    @property
    def num_waiting(self) -> int:
        """Threads that wait for their children."""
        return 0

    @property
    def may_go_on(self) -> bool:
        """Whether a thread is alive, or continues at the end of the step."""
        return bool(self.live)

    @property
    def is_over(self) -> bool:
        """Whether no thread is live, deferred or waiting."""
        return not (self.live or self.deferred or self.num_waiting)

    @property
    def remaining_tokens(self) -> int:
        """Text tokens that the request may still generate."""
        return self.token_budget - self.used_tokens

    @property
    def exhausted(self) -> bool:
        """Whether the request has used up its token budget."""
        return self.used_tokens >= self.token_budget

    @property
    def order(self) -> tuple[int, float, float, str]:
        """Sort key of the request among all: priority, then when it is due, then arrival."""
        priority, arrived_at_s = self.arrival
        due_s, deadline_at_s = arrived_at_s + DEADLINE_HORIZON_S, self.parameters.deadline_at_s
        if deadline_at_s is not None:
            due_s = min(due_s, deadline_at_s)
        return priority, due_s, arrived_at_s, self.root_id

    def may_fork(self) -> bool:
        """Return whether a fork may open a thread, now or later."""
        return not (self.closed or self.exhausted or self.num_forks >= self.parameters.max_forks)

    def has_place(self) -> bool:
        """Return whether one more thread may be alive."""
        return not self.closed and len(self.live) < self.parameters.max_threads

    @property
    def has_startable(self) -> bool:
        """Whether a deferred child fits `max_threads`."""
        return bool(self.deferred) and self.has_place()

    def continues_without(self, thread_id: str) -> bool:
        """Return whether other threads of the request run, or will run, after this one ends."""
        return not self.closed and bool(
            self.deferred or self.num_waiting or self.live != {thread_id}
        )

    def has_joined(self, thread_id: str) -> bool:
        """Return whether a thread continues after a joined text."""
        return False

    def forget(self, thread_id: str) -> None:
        """Remove a thread that has ended."""
        self.live.discard(thread_id)
        self.num_children.pop(thread_id, None)

    def next_child(self, parent_id: str) -> tuple[str, int]:
        """Return engine request id and ordinal of a thread's next child.

        Refused forks are numbered too.
        """
        ordinal = self.num_children.get(parent_id, 0)
        self.num_children[parent_id] = ordinal + 1
        return child_request_id(parent_id, ordinal), ordinal

    def within_budget(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens up to the last one that the budget allows."""
        remaining = self.remaining_tokens
        if len(token_ids) <= remaining:
            return list(token_ids)
        kept: list[int] = []
        for token_id in token_ids:
            if remaining <= 0:
                break
            kept.append(token_id)
            remaining -= not self.parameters.is_control(token_id)
        return kept

    def takes_as_text(self, token_id: int) -> bool:
        """Return whether a token is text that the request may still generate, and nothing else.

        A token that begins a tool call also ends the thread's forks.
        """
        # Called for every row of every step.
        return (
            token_id not in self._control_ids
            and self.used_tokens < self.token_budget
            and not self.closed
        )

    def count_text(self, token_ids: Sequence[int], *, stopped: bool) -> None:
        """Charge a thread's new tokens to the budget; `stopped` as in `ForkParameters`."""
        self.used_tokens += self.parameters.num_text(token_ids, stopped=stopped)


@dataclass(eq=False, kw_only=True)
class JoiningGroup(ThreadGroup[Child]):
    """All threads of a request in whose format threads wait for their children.

    rules: those of the format.
    prompt: the client's prompt.
    places: of each thread that has not ended.
    waiting: the threads that wait.
    forks: children that the root has not joined yet, where a parent joins. unjoined: what those of
        them that have ended have written, by their engine request ids.
    num_joining: parents whose children have all ended, and which continue at the end of the step.
    """

    rules: JoinRules
    prompt: Sequence[int] = ()
    places: dict[str, TextPlace] = field(default_factory=dict)
    waiting: dict[str, WaitingParent[Child]] = field(default_factory=dict)
    forks: OpenForks | None = None
    unjoined: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_joining: int = 0

    def _tokens_without_text(self) -> Container[int]:
        return self.rules.marker_ids

    @property
    def num_waiting(self) -> int:
        """Threads that wait for their children."""
        return len(self.waiting)

    @property
    def may_go_on(self) -> bool:
        """Whether a thread is alive, or continues at the end of the step."""
        return bool(self.live or self.num_joining)

    def has_joined(self, thread_id: str) -> bool:
        """Return whether a thread continues after a joined text."""
        place = self.places.get(thread_id)
        return place is not None and place.has_joined

    def forget(self, thread_id: str) -> None:
        """Remove a thread that has ended."""
        super().forget(thread_id)
        self.places.pop(thread_id, None)
        self.waiting.pop(thread_id, None)


@dataclass(eq=False, kw_only=True)
class ListGroup(JoiningGroup[Child]):
    """All threads of a request whose lists are written in parallel; only its root thread waits.

    readers: of each thread that has not ended.
    heads: threads that write the heads of a list's items, by the item's number.
    num_kept: tokens of the root since its last join that stay before the next.
    num_text: text tokens of each thread that has ended.
    ahead: heads that begin when the root has come closer, by their engine request ids.
    """

    rules: ListRules
    readers: dict[str, ListReader] = field(default_factory=dict)
    heads: dict[int, str] = field(default_factory=dict)
    num_kept: int = 0
    num_text: dict[str, int] = field(default_factory=dict)
    ahead: dict[str, Child] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether no thread is live, deferred, waiting or ahead."""
        return super().is_over and not self.ahead

    def forget(self, thread_id: str) -> None:
        """Remove a thread that has ended."""
        super().forget(thread_id)
        self.readers.pop(thread_id, None)


class ThreadTable(Generic[Child]):
    """Groups by the engine request ids of their threads, while any of these is live or deferred."""

    def __init__(self) -> None:
        self._group_of_thread: dict[str, ThreadGroup[Child]] = {}
        self._group_of_root: dict[str, ThreadGroup[Child]] = {}

    @property
    def groups(self) -> list[ThreadGroup[Child]]:
        """Every group with a live or deferred thread."""
        return list(self._group_of_root.values())

    def open_group(
        self,
        root_id: str,
        parameters: ForkParameters,
        token_budget: int,
        *,
        arrival: tuple[int, float] = (0, 0.0),
        rules: JoinRules | None = None,
    ) -> ThreadGroup[Child]:
        """Add a request with its root thread; with `rules`, its threads wait for their children.

        Raises TreeError for a duplicate id.
        """
        if root_id in self._group_of_root:
            raise TreeError(f"request {root_id!r} was added twice")
        group: ThreadGroup[Child]
        if rules is None:
            group = ThreadGroup(root_id, parameters, token_budget, arrival)
        elif isinstance(rules, ListRules):
            group = ListGroup(root_id, parameters, token_budget, arrival, rules=rules)
        else:
            group = JoiningGroup(root_id, parameters, token_budget, arrival, rules=rules)
        self._group_of_root[root_id] = group
        self.add_thread(group, root_id)
        return group

    def add_thread(self, group: ThreadGroup[Child], thread_id: str) -> None:
        """Add a live thread to its group."""
        group.live.add(thread_id)
        self._group_of_thread[thread_id] = group

    def group(self, thread_id: str) -> ThreadGroup[Child] | None:
        """Return the group of a live thread; None if the request does not fork."""
        return self._group_of_thread.get(thread_id)

    def group_of_root(self, root_id: str) -> ThreadGroup[Child] | None:
        """Return the group of a request, even after its root thread has ended."""
        return self._group_of_root.get(root_id)

    def end_thread(self, thread_id: str) -> ThreadGroup[Child] | None:
        """Remove a thread and return its group; removes the group after its last thread."""
        group = self._group_of_thread.pop(thread_id, None)
        if group is None:
            return None
        group.forget(thread_id)
        self.drop_if_ended(group)
        return group

    def pause_thread(self, thread_id: str) -> None:
        """Note that a thread waits for its children; `add_thread` notes that it continues."""
        self._group_of_thread[thread_id].live.discard(thread_id)

    def root_is_not_live(self, group: ThreadGroup[Child]) -> None:
        """Remove the root thread of a resumed request, unless it waits for its children."""
        if isinstance(group, JoiningGroup) and group.root_id in group.waiting:
            self.pause_thread(group.root_id)
        else:
            self.end_thread(group.root_id)

    def wait_thread(self, group: ThreadGroup[Child], thread_id: str) -> None:
        """Add a thread that waits for its children to its group."""
        self._group_of_thread[thread_id] = group

    def drop_if_ended(self, group: ThreadGroup[Child]) -> None:
        """Remove a group without live, deferred or waiting threads."""
        if group.is_over:
            self._group_of_root.pop(group.root_id, None)
