"""The store that counts what keys have used; asked no more for a while after it has failed."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from limits.aio.storage import SlidingWindowCounterSupport, Storage
from limits.errors import StorageError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

WINDOW_S = 60
# A shared store that does not answer must not hold requests up.
_ANSWER_S = 0.5
# Requests of one key ask one after the other, and each would wait for the answer anew.
_SILENCE_S = 5.0


class StoreSilentError(StorageError):
    """The store has just failed, and is not asked yet again."""

    def __init__(self) -> None:
        super().__init__(TimeoutError("the store of the counters has just failed"))


STORE_FAILURES = (StorageError, OSError)  # TimeoutError is an OSError.
"""What a call raises where the store fails."""


class CounterStore:
    """Sliding windows of a minute; for all keys of a gateway, who learn of a failure together."""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = cast("SlidingWindowCounterSupport", storage)
        self._clock = clock
        self._silent_until_s = clock()

    async def read(self, place: str) -> tuple[int, float, int, float]:
        """Units in the previous window, its seconds left, and the same of the current one."""
        return await self._answer(lambda: self._storage.get_sliding_window(place, WINDOW_S))

    async def take(self, place: str, limit: int, num: int) -> bool:
        """Count so many units, if the limit leaves room for them; whether it did."""
        return await self._answer(
            lambda: self._storage.acquire_sliding_window_entry(place, limit, WINDOW_S, num)
        )

    async def _answer(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        if self._clock() < self._silent_until_s:
            raise StoreSilentError
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await ask()
        except STORE_FAILURES as error:
            self._silent_until_s = self._clock() + _SILENCE_S
            logger.warning("rates not counted: their store fails", extra={"reason": repr(error)})
            raise
