"""Accounts of the keys in one model's queue: running requests, waiting requests and usage.

A key has one account for each priority that its requests ask for, and a client may use 2,001
priorities. So nothing here iterates over a key's accounts: counters are kept per key, and only the
most urgent account with waiting requests can be next. Virtual times are comparable within a class,
the accounts of one priority. Once a class has neither running nor waiting requests, all its
accounts are forgotten, debts included. Source: Goyal et al., "Start-time fair queueing" (1996):
virtual time begins anew with each busy period.
"""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Size(NamedTuple):
    """Size of a request: one slot per sequence, and the estimated tokens of its prompts."""

    num_sequences: int = 1
    prompt_tokens: int = 0


ONE = Size()


def has_room(num_running: int, limit: int, size: Size) -> bool:
    """Return whether a limit on running sequences leaves room for a request.

    A request larger than the limit runs alone: the limit may have fallen while it waited, or be
    this gateway's part of a limit that all gateways share.
    """
    return num_running + size.num_sequences <= limit or (num_running == 0 < limit)


@dataclass(slots=True, eq=False)
class QueuedKey:
    """A key in the queue: its limits, and its requests of all priorities.

    `max_running` caps the key's running sequences here, and `cap` those in all gateways together.
    `times_full` counts how often the cap has been found to hold back a request. `num_running` and
    `waiting_sequences` count sequences, `num_waiting` counts requests.
    """

    name: str
    weight: float = 1.0
    max_running: int | None = None
    cap: int | None = None
    num_running: int = 0
    num_waiting: int = 0
    waiting_sequences: int = 0
    times_full: int = 0
    accounts: "dict[int, Account]" = field(default_factory=dict)
    priorities: list[int] = field(default_factory=list)  # with waiting requests, sorted

    @property
    def may_run(self) -> bool:
        """Whether the key's own cap leaves room for its next request."""
        return self.has_room(self.first.next.size if self.priorities else Size())

    def has_room(self, size: Size) -> bool:
        """Return whether the key's own cap leaves room for a request."""
        return self.max_running is None or has_room(self.num_running, self.max_running, size)

    @property
    def num_startable(self) -> int:
        """Waiting sequences that would run if the replicas had unlimited slots."""
        if self.max_running is None:
            return self.waiting_sequences
        room = max(0, self.max_running - self.num_running)
        return min(self.waiting_sequences, room) if self.may_run else 0

    @property
    def first(self) -> "Account":
        """The key's account whose turn it is: its most urgent one with waiting requests."""
        return self.accounts[self.priorities[0]]


@dataclass(slots=True, eq=False)
class PriorityClass:
    """The accounts of one priority since it was last idle."""

    priority: int
    num_running: int = 0
    num_waiting: int = 0
    last_started: "Account | None" = None
    accounts: "list[Account]" = field(default_factory=list)
    backlogged: "dict[Account, None]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Account:
    """The requests of one key and priority.

    `virtual_time` counts tokens divided by the key's weight. `mean_tokens` is the mean length of
    an answer's sequences, `mean_prompt` the mean cost of a request's prompts. `lifted_at` is the
    key's `times_full` when the virtual time was last raised to that of its rivals, None if the key
    was full then.
    """

    key: QueuedKey
    peers: PriorityClass
    virtual_time: float = 0.0
    num_running: int = 0
    mean_tokens: float = 0.0
    mean_prompt: float = 0.0
    lifted_at: int | None = None
    waiting: "dict[Waiter, None]" = field(default_factory=dict)  # in order of arrival

    @property
    def priority(self) -> int:
        """The priority of all requests of the account."""
        return self.peers.priority

    @property
    def held(self) -> bool:
        """Whether the key has been at its cap since the virtual time was last raised."""
        return self.lifted_at != self.key.times_full

    @property
    def backlog(self) -> float:
        """Drop order: the account with the highest value loses requests from a full queue first."""
        return len(self.waiting) / self.key.weight

    @property
    def next(self) -> "Waiter":
        """The account's first waiting request."""
        return next(iter(self.waiting))

    @property
    def turn(self) -> tuple[int, float, float]:
        """Service order of accounts with waiting requests: class, virtual time, then arrival."""
        return self.priority, self.virtual_time, self.next.since_s


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting request; `granted` becomes its ticket."""

    account: Account
    size: Size
    granted: asyncio.Future[Any]
    since_s: float


class Accounts:
    """All accounts of a queue, except those of idle classes."""

    def __init__(self) -> None:
        self.num_running = 0
        self.num_sequences = 0
        """Running sequences of all requests."""
        self.num_waiting = 0
        self.keys: dict[str, QueuedKey] = {}
        self.backlogged: dict[QueuedKey, None] = {}
        """Keys with waiting requests."""
        self._classes: dict[int, PriorityClass] = {}
        self._waiting_priorities: list[int] = []  # sorted

    def of(self, name: str, priority: int) -> Account:
        """Return the account of a key and priority.

        A new one is kept until `forget_idle` finds its class idle.
        """
        key = self.keys.get(name)
        if key is None:
            key = self.keys[name] = QueuedKey(name)
        account = key.accounts.get(priority)
        if account is None:
            peers = self._classes.get(priority)
            if peers is None:
                peers = self._classes[priority] = PriorityClass(priority)
            account = key.accounts[priority] = Account(key, peers)
            peers.accounts.append(account)
        return account

    def start(self, account: Account, size: Size) -> None:
        """Count a request that starts to run."""
        self.num_running += 1
        self.num_sequences += size.num_sequences
        account.num_running += 1
        account.peers.num_running += 1
        account.peers.last_started = account
        account.key.num_running += size.num_sequences
        _note_full(account.key)

    def end(self, account: Account, size: Size) -> None:
        """Stop counting a running request."""
        self.num_running -= 1
        self.num_sequences -= size.num_sequences
        account.num_running -= 1
        account.peers.num_running -= 1
        account.key.num_running -= size.num_sequences

    def wait(self, waiter: Waiter) -> None:
        """Add a waiting request."""
        account, key, peers = waiter.account, waiter.account.key, waiter.account.peers
        self.num_waiting += 1
        if not account.waiting:
            insort(key.priorities, account.priority)
            peers.backlogged[account] = None
        account.waiting[waiter] = None
        if not key.num_waiting:
            self.backlogged[key] = None
        key.num_waiting += 1
        key.waiting_sequences += waiter.size.num_sequences
        if not peers.num_waiting:
            insort(self._waiting_priorities, peers.priority)
        peers.num_waiting += 1
        _note_full(key)

    def stop_waiting(self, waiter: Waiter) -> None:
        """Remove a waiting request."""
        account, key, peers = waiter.account, waiter.account.key, waiter.account.peers
        self.num_waiting -= 1
        del account.waiting[waiter]
        if not account.waiting:
            _remove(key.priorities, account.priority)
            del peers.backlogged[account]
        key.num_waiting -= 1
        key.waiting_sequences -= waiter.size.num_sequences
        if not key.num_waiting:
            del self.backlogged[key]
        peers.num_waiting -= 1
        if not peers.num_waiting:
            _remove(self._waiting_priorities, peers.priority)
        _note_full(key)

    def forget_idle(self, priority: int) -> None:
        """Forget the accounts of a class that has neither running nor waiting requests."""
        peers = self._classes.get(priority)
        if peers is None or peers.num_running or peers.num_waiting:
            return
        del self._classes[priority]
        for account in peers.accounts:
            del account.key.accounts[priority]
            if not account.key.accounts:
                del self.keys[account.key.name]

    def num_more_urgent(self, priority: int) -> int:
        """Return the number of waiting requests of more urgent classes."""
        end = bisect_left(self._waiting_priorities, priority)
        return sum(self._classes[each].num_waiting for each in self._waiting_priorities[:end])

    def num_waiting_of(self, priority: int) -> int:
        """Return the number of waiting requests of one class."""
        peers = self._classes.get(priority)
        return 0 if peers is None else peers.num_waiting

    @property
    def least_urgent(self) -> Iterable[Account]:
        """The accounts with waiting requests of the least urgent class that has any."""
        if not self._waiting_priorities:
            return ()
        return self._classes[self._waiting_priorities[-1]].backlogged


def _note_full(key: QueuedKey) -> None:
    if not key.may_run:
        key.times_full += 1


def _remove(priorities: list[int], priority: int) -> None:
    del priorities[bisect_left(priorities, priority)]
