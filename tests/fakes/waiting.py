"""Wait for what a test needs, instead of for a time in which it usually happens."""

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 120.0
"""Longer than any machine needs; a test fails after it."""


async def until(condition: Callable[[], object]) -> None:
    """Return when the condition is true."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object]) -> None:
    """Return when the condition is true."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
