"""What a model's queue knows of one key."""

import asyncio
from dataclasses import dataclass, field
from typing import Any


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
