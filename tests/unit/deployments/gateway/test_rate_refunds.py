"""What is given back, and a store of the counters that does not answer."""

import asyncio
from typing import Any

import pytest
from limits.aio.storage import MemoryStorage

from cluster.config.limits import open_storage
from deployments.gateway import rate_limits as counter_store
from deployments.gateway.rate_limits import CounterStore, StoreSilentError
from deployments.wire.errors import RateLimitError
from tests.unit.deployments.gateway.test_rate_limits import Advance, advance, rates, shown

__all__ = ["advance"]


async def test_no_more_comes_back_than_the_window_still_counts(advance: Advance) -> None:
    limited = rates(tokens_per_minute=100)
    await limited.admit_tokens(90)
    limited.use_tokens(-80)
    advance(121.0)  # The window has forgotten the 90.

    await limited.admit_tokens(60)
    await limited.admit_tokens(40)

    with pytest.raises(RateLimitError, match="100 used"):
        await limited.admit_tokens(1)


async def test_refunds_do_not_pile_up_beyond_the_limit(advance: Advance) -> None:
    limited = rates(tokens_per_minute=100)
    await limited.admit_tokens(100)
    for _ in range(50):
        limited.use_tokens(-100)
    limited.use_tokens(150)

    with pytest.raises(RateLimitError, match="150 used"):
        await limited.admit_tokens(1)


async def test_a_request_that_was_let_in_no_further_is_given_back(advance: Advance) -> None:
    limited = rates(tokens_per_minute=100, requests_per_minute=2)
    admission = (*await limited.admit_request(), *await limited.admit_tokens(70))

    limited.give_back(admission)

    headers = await shown(limited)
    assert headers["x-ratelimit-remaining-tokens"] == "100"
    assert headers["x-ratelimit-remaining-requests"] == "2"


class HangingStorage(MemoryStorage):
    """A store that takes every question and answers none."""

    STORAGE_SCHEME = None  # type: ignore[assignment]
    num_asked = 0

    async def acquire_sliding_window_entry(self, *_: Any, **__: Any) -> bool:
        self.num_asked += 1
        await asyncio.Event().wait()
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the tests set; a store's answer is waited for in real time, but shortly."""
    monkeypatch.setattr(counter_store, "_ANSWER_S", 0.01)
    return [0.0]


async def test_a_store_that_hangs_is_asked_once_for_all_that_wait(clock: list[float]) -> None:
    storage = HangingStorage()
    limited = rates(CounterStore(storage, lambda: clock[0]), requests_per_minute=1)

    await asyncio.gather(*(limited.admit_request() for _ in range(20)))
    assert (storage.num_asked, await shown(limited)) == (1, {})
    clock[0] = 5.1
    await limited.admit_request()

    assert storage.num_asked == 2


async def test_a_store_that_has_come_back_counts_again(clock: list[float]) -> None:
    storage = open_storage("memory://")
    store = CounterStore(storage, lambda: clock[0])
    assert await store.take("a", 1, 1)
    hanging = HangingStorage()
    store._storage = hanging
    with pytest.raises(TimeoutError):
        await store.take("a", 1, 1)
    store._storage = storage  # type: ignore[assignment]

    with pytest.raises(StoreSilentError):
        await store.take("a", 1, 1)
    clock[0] = 5.1

    assert not await store.take("a", 1, 1)
