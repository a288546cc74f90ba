"""Requests and tokens per minute of each key, in sliding windows of the `limits` library."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from limits.errors import StorageError

from deployments.config.keys import KeyConfig
from deployments.wire.errors import PromptTooLongError, RateLimitError
from deployments.wire.response import Headers

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

WINDOW_S = 60
# Timeout of the shared store: a silent store must not delay requests for longer.
_ANSWER_S = 0.5
# After a failure the store is not asked for this long: requests of one key would wait in turn.
_SILENCE_S = 5.0


class StoreSilentError(StorageError):
    """The store has just failed and is not asked again yet."""

    def __init__(self) -> None:
        super().__init__(TimeoutError("the store of the counters has just failed"))


STORE_FAILURES = (StorageError, OSError)  # TimeoutError is an OSError.
"""Exceptions of a failing store."""


class WindowStorage(Protocol):
    """The part of `limits.aio.storage.SlidingWindowCounterSupport` that is used here."""

    async def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:
        """Count units if the limit has room for them; return whether it had."""
        ...

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """Return (units, seconds left) of the previous window, then of the current one."""
        ...


class CounterStore:
    """One-minute sliding windows; a failure of the store is remembered for all keys."""

    def __init__(
        self,
        storage: object,
        clock: Callable[[], float] = time.monotonic,
        *,
        answer_s: float = _ANSWER_S,
    ) -> None:
        """`storage` is a WindowStorage, although its type in `limits` does not say so."""
        self._storage = cast("WindowStorage", storage)
        self._clock = clock
        self._answer_s = answer_s
        self._silent_until_s = clock()

    async def read(self, place: str) -> tuple[int, float, int, float]:
        """Return (units, seconds left) of the previous window, then of the current one."""
        return await self._answer(lambda: self._storage.get_sliding_window(place, WINDOW_S))

    async def take(self, place: str, limit: int, num: int) -> bool:
        """Count units if the limit has room for them; return whether it had."""
        return await self._answer(
            lambda: self._storage.acquire_sliding_window_entry(place, limit, WINDOW_S, num)
        )

    async def _answer(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        if self._clock() < self._silent_until_s:
            raise StoreSilentError
        try:
            async with asyncio.timeout(self._answer_s):
                return await ask()
        except STORE_FAILURES as error:
            self._silent_until_s = self._clock() + _SILENCE_S
            logger.warning("rates not counted: the store fails", extra={"reason": repr(error)})
            raise


@dataclass(frozen=True, slots=True)
class WindowState:
    """State of a sliding window, which is the weighted sum of two fixed windows.

    `previous` counts in proportion to `previous_s`, the seconds left of that window. In `roll_s`
    seconds the current window becomes the previous one.
    """

    limit: int
    previous: int
    previous_s: float
    current: int
    roll_s: float

    @property
    def remaining(self) -> int:
        """Units that may be used now."""
        weighted = self.previous * self.previous_s / WINDOW_S
        return max(0, self.limit - self.current - math.floor(weighted))

    @property
    def reset_s(self) -> float:
        """Seconds until the window is empty, if nothing more is used."""
        if self.current:
            return self.roll_s + WINDOW_S
        return self.previous_s if self.previous else 0.0

    def wait_s(self, wanted: int) -> float:
        """Return the seconds until units (at most the limit) fit, if no others are used before."""
        # The library rounds the weighted sum down, so it only has to fall below this bound.
        bound = self.limit - wanted + 1
        if self.current < bound:
            if not self.previous:
                return 0.0
            return max(0.0, self.previous_s - (bound - self.current) * WINDOW_S / self.previous)
        return self.roll_s + WINDOW_S * (1 - bound / self.current)


class Window:
    """One rate limit of one key.

    Units that are used without asking, such as generated tokens, become a debt. The debt is paid
    from the window as soon as it has room, before anything else is taken. The rate is therefore
    exact in the long run, however long the answers are. A negative debt is a refund; it never
    exceeds what the window still counts.
    """

    def __init__(self, store: CounterStore, *, key: str, kind: str, limit: int) -> None:
        self._store = store
        # Without the limit, unlike the library's own keys: usage still counts after it changes.
        self._place = f"apar/{key}/{kind}"
        self._key = key
        self.kind = kind
        self.limit = limit
        self._debt = 0
        # Otherwise several requests could pass while the same debt is being paid.
        self._lock = asyncio.Lock()

    def owe(self, num: int) -> None:
        """Count units as used; a negative number refunds units."""
        self._debt = max(self._debt + num, -self.limit)

    async def take(self, num: int, *, leaves_half: bool = False) -> None:
        """Use units, at most the limit. Raises RateLimitError if there is no room for them.

        With `leaves_half`, half of the limit must remain, unless nothing is used at all.
        """
        spare = self.limit // 2 if leaves_half else 0
        async with self._lock:
            paid = await self._pay()
            # Refunds are used first.
            due = max(0, num + self._debt)
            if paid and spare:
                remaining = (await self.state()).remaining
                paid = remaining - due >= spare or remaining >= self.limit
            if paid and await self._hit(due):
                self._debt += num - due
                return
            state = await self.state()
        wanted = max(0, num + self._debt)
        wait_s = state.wait_s(min(wanted + spare, self.limit))
        wait_s += max(0, wanted - self.limit) * WINDOW_S / self.limit
        used = max(0, self.limit - state.remaining + self._debt)
        raise RateLimitError(
            f"Rate limit reached for key {self._key}: {self.limit} {self.kind} per minute, "
            f"{used} used, {num} asked for. Please try again in {duration(wait_s)}.",
            kind=self.kind,
            retry_after_s=wait_s,
        )

    async def settle(self) -> None:
        """Pay the debt as far as there is room, so that other gateways see it at once."""
        if self._debt > 0:
            async with self._lock:
                await self._pay()

    async def state(self) -> WindowState:
        """Return the window's state, without the debt."""
        previous, previous_s, current, current_s = await self._store.read(self._place)
        return WindowState(
            self.limit, previous, previous_s, current, max(0.0, current_s - WINDOW_S)
        )

    async def headers(self) -> Headers:
        """Return OpenAI's `x-ratelimit-*` headers for this rate."""
        state = await self.state()
        values = {
            "limit": str(self.limit),
            "remaining": str(min(self.limit, max(0, state.remaining - self._debt))),
            "reset": duration(state.reset_s),
        }
        return [
            (f"x-ratelimit-{name}-{self.kind}".encode(), value.encode())
            for name, value in values.items()
        ]

    async def _pay(self) -> bool:
        """Pay as much of the debt as the window has room for; return whether it is paid off."""
        if self._debt > 0:
            payable = min(self._debt, (await self.state()).remaining)
            if payable and await self._hit(payable):
                self._debt -= payable
        elif self._debt < 0:
            # What the window has forgotten cannot be refunded.
            remaining = (await self.state()).remaining
            self._debt = max(self._debt, remaining - self.limit)
        return self._debt <= 0

    async def _hit(self, num: int) -> bool:
        return await self._store.take(self._place, self.limit, num)


Admission = Sequence[tuple[Window, int]]
"""The units charged for a request, per window."""


class KeyRates:
    """The rate limits of one key; rates without a limit are not counted.

    If the store fails, requests pass: its outage must not become an outage of the cluster.
    """

    def __init__(self, store: CounterStore, key: KeyConfig) -> None:
        limits = {"tokens": key.tokens_per_minute, "requests": key.requests_per_minute}
        self._windows = {
            kind: Window(store, key=key.name, kind=kind, limit=limit)
            for kind, limit in limits.items()
            if limit is not None
        }

    async def admit_request(self, *, leaves_half: bool = False) -> Admission:
        """Count one request. Raises RateLimitError.

        `leaves_half` keeps half of the rate for others: a batch must not use it up.
        """
        return await self._take("requests", 1, leaves_half=leaves_half)

    async def admit_tokens(self, num: int, *, leaves_half: bool = False) -> Admission:
        """Count the tokens of a prompt. Raises RateLimitError.

        Raises PromptTooLongError for more than the limit, which would be a debt of many minutes.
        """
        window = self._windows.get("tokens")
        if window is not None and num > window.limit:
            raise PromptTooLongError(
                f"The prompts of this request have about {num} tokens; the limit "
                f"`tokens_per_minute` of this key is {window.limit}. Shorten or split the request."
            )
        return await self._take("tokens", num, leaves_half=leaves_half)

    async def _take(self, kind: str, num: int, *, leaves_half: bool) -> Admission:
        window = self._windows.get(kind)
        if window is None:
            return ()
        try:
            await window.take(num, leaves_half=leaves_half)
        except STORE_FAILURES:
            return ()
        return ((window, num),)

    def refund(self, admission: Admission) -> None:
        """Refund a request that the server has no room for, or whose client left the queue."""
        for window, num in admission:
            window.owe(-num)

    def use_tokens(self, num: int) -> None:
        """Count generated tokens, or correct the estimate of a prompt."""
        if window := self._windows.get("tokens"):
            window.owe(num)

    async def settle(self) -> None:
        """Charge outstanding tokens to the store, where other gateways see them."""
        with suppress(*STORE_FAILURES):
            for window in self._windows.values():
                await window.settle()

    async def headers(self) -> Headers:
        """Return the `x-ratelimit-*` headers, tokens first; none while the store fails."""
        try:
            windows = self._windows.values()
            return [header for window in windows for header in await window.headers()]
        except STORE_FAILURES:
            return []


def duration(seconds: float) -> str:
    """Format a time as OpenAI's headers do: `120ms`, `1.5s`, `6m0s`, `1h2m3s`."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
