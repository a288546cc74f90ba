"""Windows, debts and headers of a key's rates; the clock is the library's, set by the tests."""

import asyncio
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits.aio.storage import MemoryStorage

from deployments.config.keys import KeyConfig, hash_of
from deployments.config.limits import open_storage
from deployments.gateway.rate_limits import (
    CounterStore,
    KeyRates,
    StoreSilentError,
    WindowState,
    duration,
)
from deployments.wire.errors import PromptTooLongError, RateLimitError
from tests.fakes.clock import Clock
from tests.unit.deployments.gateway.conftest import Advance


def rates(storage: Any = None, **fields: Any) -> KeyRates:
    key = KeyConfig(name="alice", hash=hash_of("k"), **fields)
    if not isinstance(storage, CounterStore):
        storage = CounterStore(storage or open_storage("memory://"))
    return KeyRates(storage, key)


async def shown(limited: KeyRates) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in await limited.headers()}


async def test_a_request_over_the_limit_is_refused_until_the_window_has_room(
    advance: Advance,
) -> None:
    limited = rates(requests_per_minute=3)
    for _ in range(3):
        await limited.admit_request()

    with pytest.raises(RateLimitError, match=r"3 requests per minute, 3 used, 1 asked") as refused:
        await limited.admit_request()

    # All three count until the minute ends, and less and less from there on.
    assert refused.value.retry_after_s == pytest.approx(60.0)
    advance(59.9)
    with pytest.raises(RateLimitError):
        await limited.admit_request()
    advance(0.2)
    await limited.admit_request()
    with pytest.raises(RateLimitError) as refused:
        await limited.admit_request()
    assert refused.value.retry_after_s == pytest.approx(19.9)
    advance(20.0)
    await limited.admit_request()


async def test_generated_tokens_are_paid_before_new_ones_are_admitted(
    advance: Advance,
) -> None:
    limited = rates(tokens_per_minute=100)
    await limited.admit_tokens(40)
    limited.use_tokens(260)  # One long answer, far over the limit.

    with pytest.raises(RateLimitError, match=r"tokens per minute, 300 used") as refused:
        await limited.admit_tokens(10)

    assert refused.value.retry_after_s > 120
    waited = 0.0
    while True:
        advance(10.0)
        waited += 10.0
        try:
            await limited.admit_tokens(10)
        except RateLimitError:
            continue
        break
    # 300 tokens at 100 a minute, less the minute's worth that a fresh window allows at once.
    assert 120 < waited <= 200


async def test_tokens_estimated_too_high_are_refunded(advance: Advance) -> None:
    limited = rates(tokens_per_minute=100)
    await limited.admit_tokens(90)
    limited.use_tokens(-50)
    assert (await shown(limited))["x-ratelimit-remaining-tokens"] == "60"

    await limited.admit_tokens(60)

    with pytest.raises(RateLimitError, match="100 used"):
        await limited.admit_tokens(1)


async def test_a_prompt_over_the_limit_is_refused_and_leaves_no_debt(advance: Advance) -> None:
    limited = rates(tokens_per_minute=100)

    with pytest.raises(PromptTooLongError, match=r"about 101 tokens.*`tokens_per_minute`.*is 100"):
        await limited.admit_tokens(101)

    await limited.admit_tokens(100)


async def test_a_refusal_reports_used_and_owed_tokens(advance: Advance) -> None:
    limited = rates(tokens_per_minute=100)
    await limited.admit_tokens(30)
    limited.use_tokens(45)

    with pytest.raises(RateLimitError, match=r"75 used, 26 asked for"):
        await limited.admit_tokens(26)

    await limited.admit_tokens(25)


async def test_a_refused_request_counts_no_tokens(advance: Advance) -> None:
    limited = rates(tokens_per_minute=100, requests_per_minute=1)
    await limited.admit_request()
    await limited.admit_tokens(30)

    with pytest.raises(RateLimitError) as refused:
        await limited.admit_request()

    assert refused.value.kind == "requests"
    assert (await shown(limited))["x-ratelimit-remaining-tokens"] == "70"


async def test_headers_are_openais(advance: Advance) -> None:
    limited = rates(tokens_per_minute=100, requests_per_minute=10)
    fresh = await shown(limited)
    await limited.admit_request()
    await limited.admit_tokens(30)
    limited.use_tokens(5)
    advance(0.25)

    assert fresh["x-ratelimit-reset-tokens"] == "0ms"
    assert await shown(limited) == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "65",
        "x-ratelimit-reset-tokens": "2m0s",
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "2m0s",
    }
    assert await shown(rates()) == {}
    limited.use_tokens(100)
    assert (await shown(limited))["x-ratelimit-remaining-tokens"] == "0"
    advance(74.75)
    # The 30 tokens of the minute before count until the present one ends.
    assert (await shown(limited))["x-ratelimit-reset-tokens"] == "45s"


async def test_keys_that_share_a_store_and_a_name_share_their_rate(advance: Advance) -> None:
    storage = open_storage("memory://")
    await rates(storage, requests_per_minute=1).admit_request()

    with pytest.raises(RateLimitError):
        await rates(storage, requests_per_minute=1).admit_request()


class FailingStorage(MemoryStorage):
    """A store that cannot be reached."""

    STORAGE_SCHEME = None  # type: ignore[assignment]

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        raise ConnectionRefusedError

    async def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:
        await asyncio.sleep(60)
        return True


@pytest.mark.usefixtures("simulated_time")
async def test_requests_pass_if_the_store_fails() -> None:
    store = CounterStore(FailingStorage(), answer_s=0.01)
    limited = rates(store, requests_per_minute=1)

    await limited.admit_request()
    admission = await limited.admit_request()

    limited.refund(admission)
    assert await shown(limited) == {}


@given(
    limit=st.integers(1, 1000),
    previous=st.integers(0, 1000),
    current=st.integers(0, 1000),
    roll_s=st.floats(0, 60),
    wanted=st.integers(1, 1000),
)
def test_there_is_room_after_the_wait_and_not_before(
    limit: int, previous: int, current: int, roll_s: float, wanted: int
) -> None:
    wanted = min(wanted, limit)
    previous, current = min(previous, limit), min(current, limit)
    state = WindowState(limit, previous, roll_s, current, roll_s)

    def room_after(seconds: float) -> int:
        if seconds < roll_s:
            return limit - math.floor(current + previous * (roll_s - seconds) / 60)
        return limit - math.floor(current * max(0.0, 60 - (seconds - roll_s)) / 60)

    wait_s = state.wait_s(wanted)

    assert room_after(wait_s + 1e-6) >= wanted
    if wait_s > 0.01:
        assert room_after(wait_s - 0.01) < wanted


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0123, "13ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.999, "59.999s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (3723, "1h2m3s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def test_a_refund_is_limited_to_what_the_window_still_counts(advance: Advance) -> None:
    limited = rates(tokens_per_minute=100)
    await limited.admit_tokens(90)
    limited.use_tokens(-80)
    advance(121.0)  # The window has forgotten the 90.

    await limited.admit_tokens(60)
    await limited.admit_tokens(40)

    with pytest.raises(RateLimitError, match="100 used"):
        await limited.admit_tokens(1)


async def test_refunds_do_not_accumulate_beyond_the_limit(advance: Advance) -> None:
    limited = rates(tokens_per_minute=100)
    await limited.admit_tokens(100)
    for _ in range(50):
        limited.use_tokens(-100)
    limited.use_tokens(150)

    with pytest.raises(RateLimitError, match="150 used"):
        await limited.admit_tokens(1)


async def test_an_admission_can_be_refunded(advance: Advance) -> None:
    limited = rates(tokens_per_minute=100, requests_per_minute=2)
    admission = (*await limited.admit_request(), *await limited.admit_tokens(70))

    limited.refund(admission)

    headers = await shown(limited)
    assert headers["x-ratelimit-remaining-tokens"] == "100"
    assert headers["x-ratelimit-remaining-requests"] == "2"


class HangingStorage(MemoryStorage):
    """A store that does not answer while `hangs` is set."""

    STORAGE_SCHEME = None  # type: ignore[assignment]
    hangs = True
    num_asked = 0

    async def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:
        self.num_asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        return await super().acquire_sliding_window_entry(key, limit, expiry, amount)


@pytest.mark.usefixtures("simulated_time")
async def test_a_store_that_hangs_is_asked_once_for_all_waiting_requests() -> None:
    storage, clock = HangingStorage(), Clock()
    limited = rates(CounterStore(storage, clock, answer_s=0.01), requests_per_minute=1)

    await asyncio.gather(*(limited.admit_request() for _ in range(20)))
    assert (storage.num_asked, await shown(limited)) == (1, {})
    clock.now_s = 5.1
    await limited.admit_request()

    assert storage.num_asked == 2


@pytest.mark.usefixtures("simulated_time")
async def test_a_store_that_recovers_counts_again() -> None:
    storage, clock = HangingStorage(), Clock()
    store = CounterStore(storage, clock, answer_s=0.01)
    storage.hangs = False
    assert await store.take("a", 1, 1)
    storage.hangs = True
    with pytest.raises(TimeoutError):
        await store.take("a", 1, 1)
    storage.hangs = False

    with pytest.raises(StoreSilentError):
        await store.take("a", 1, 1)
    clock.now_s = 5.1

    assert not await store.take("a", 1, 1)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_several_gateways_admit_one_answer_each_more_than_one_gateway(
    advance: Advance, seed: int
) -> None:
    """Each owes the tokens of its own last answers; all pay from the same window."""
    draw = random.Random(seed)
    limit, longest, num_gateways, minutes = 100, 250, 3, 12
    shared = CounterStore(open_storage("memory://"))
    gateways = [rates(shared, tokens_per_minute=limit) for _ in range(num_gateways)]
    used = refused = 0
    for _ in range(minutes * 60):
        for gateway in draw.sample(gateways, num_gateways):
            try:
                await gateway.admit_tokens(5)
            except RateLimitError:
                refused += 1
                continue
            generated = draw.randint(0, longest)
            gateway.use_tokens(generated)
            used += 5 + generated
        advance(1.0)
        for gateway in gateways:
            await gateway.settle()

    # The windows, and the answer that each gateway gave before it had to pay.
    assert limit * (minutes - 1) <= used <= limit * (minutes + 1) + num_gateways * longest
    assert refused > 0


async def test_tokens_of_a_finished_answer_count_at_the_other_gateways(advance: Advance) -> None:
    shared = CounterStore(open_storage("memory://"))
    first, second = (rates(shared, tokens_per_minute=100) for _ in range(2))
    await first.admit_tokens(10)
    first.use_tokens(90)

    await first.settle()

    with pytest.raises(RateLimitError):
        await second.admit_tokens(1)
