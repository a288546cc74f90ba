"""Usage counted in memory, written in batches, and compared with budgets."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from deployments.gateway.key_store import Batch, KeyStore, Row, SqliteStore, Usage, Used
from deployments.gateway.ledger import Ledger, renewal
from deployments.gateway.request_log import RequestRecord
from deployments.wire.errors import BudgetError, StoreError, response_for
from tests.fakes.replicas import key


class Calendar:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 30, 23, 59, 30, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


class FailingStore(SqliteStore):
    """A store that can be made to fail, after or before it has written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fails = False
        self.num_written_unseen = 0

    async def add(self, batch: Batch) -> None:
        if self.num_written_unseen:
            self.num_written_unseen -= 1
            await super().add(batch)
            raise StoreError("no answer in time")
        if self.fails:
            raise StoreError("down")
        await super().add(batch)

    async def used(self, key: str, day: str) -> Used:
        if self.fails:
            raise StoreError("down")
        return await super().used(key, day)


def ended(**fields: object) -> RequestRecord:
    record = RequestRecord("id", "POST", "/v1/chat/completions", status=200, sent_s=0.1)
    for name, value in fields.items():
        setattr(record, name, value)
    return record


async def reported(store: KeyStore) -> list[tuple[Row, Usage]]:
    return await store.report("2026-11-01", "2026-12-31")


async def test_a_request_is_counted_as_it_goes_on(tmp_path: Path) -> None:
    store, calendar = SqliteStore(tmp_path / "a.db"), Calendar()
    ledger = Ledger(store, now=calendar)
    tally = ledger.begin(key("a"), "m", 10)
    tally.generated(4)
    await ledger.flush()
    row = Row("2026-11-30", "a", "m")
    assert await reported(store) == [(row, Usage(requests=1, generated_tokens=4))]

    calendar.now += timedelta(minutes=1)
    tally.generated(5)
    tally.close(ended(prompt_tokens=8, threads=3, forks=2, error_code="engine_lost"))
    ledger.refused("a", RequestRecord("id", "POST", "/v1/chat/completions", status=429))
    await ledger.flush()

    tomorrow = Usage(prompt_tokens=8, generated_tokens=5, threads=3, forks=2, errors=1)
    assert await reported(store) == [
        (row, Usage(requests=1, generated_tokens=4)),
        (Row("2026-12-01", "a", "m"), tomorrow),
        (Row("2026-12-01", "a", "unknown"), Usage(refused=1)),
    ]
    await ledger.close()


async def test_a_request_that_was_never_sent_is_not_counted(tmp_path: Path) -> None:
    ledger = Ledger(store := SqliteStore(tmp_path / "a.db"), now=Calendar())
    tally = ledger.begin(limited := key("a", requests_per_day=1), "m", 10)
    with pytest.raises(BudgetError):
        await ledger.check(limited)

    tally.close(ended(sent_s=None, status=503))

    await ledger.check(limited)
    await ledger.flush()
    assert await reported(store) == [(Row("2026-11-30", "a", "m"), Usage())]
    await ledger.close()


async def test_a_request_that_another_model_answers_counts_for_that_one(tmp_path: Path) -> None:
    ledger = Ledger(store := SqliteStore(tmp_path / "a.db"), now=Calendar())
    tally = ledger.begin(key("a"), "m", 10)
    await ledger.flush()

    tally.answered_by("other")
    tally.generated(4)
    tally.close(ended(prompt_tokens=8))
    await ledger.flush()

    counted = Usage(requests=1, prompt_tokens=8, generated_tokens=4)
    assert await reported(store) == [
        (Row("2026-11-30", "a", "m"), Usage()),
        (Row("2026-11-30", "a", "other"), counted),
    ]
    await ledger.close()


async def test_nothing_is_lost_at_a_clean_stop(tmp_path: Path) -> None:
    ledger = Ledger(SqliteStore(tmp_path / "a.db"), flush_s=60, now=Calendar())
    ledger.begin(key("a"), "m", 0).close(ended(prompt_tokens=3))

    await ledger.close()

    again = SqliteStore(tmp_path / "a.db")
    assert [usage for _, usage in await reported(again)] == [Usage(requests=1, prompt_tokens=3)]
    await again.close()


async def test_usage_survives_an_outage_of_the_store_and_counts_once(tmp_path: Path) -> None:
    store = FailingStore(tmp_path / "a.db")
    ledger = Ledger(store, flush_s=0.01, now=Calendar())
    store.fails = True
    ledger.begin(key("a"), "m", 0)
    with pytest.raises(StoreError):
        await ledger.flush()
    assert await reported(store) == []
    ledger.begin(limited := key("a", requests_per_day=2), "m", 0)
    with pytest.raises(BudgetError):  # What is not written yet counts, too.
        await ledger.check(limited)

    store.fails, store.num_written_unseen = False, 1
    async with asyncio.timeout(120):
        while [each.requests for _, each in await reported(store)] != [2]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    # The second write of the batch, whose first answer was lost, adds nothing.
    await ledger.flush()
    assert [usage.requests for _, usage in await reported(store)] == [2]
    await ledger.close()


@pytest.mark.parametrize(
    ("field", "renews_at"),
    [
        ("requests_per_day", "2026-12-01T00:00:00Z"),
        ("tokens_per_day", "2026-12-01T00:00:00Z"),
        ("requests_per_month", "2026-12-01T00:00:00Z"),
        ("tokens_per_month", "2026-12-01T00:00:00Z"),
    ],
)
async def test_a_used_up_budget_says_which_and_when_it_renews(
    tmp_path: Path, field: str, renews_at: str
) -> None:
    calendar = Calendar()
    ledger = Ledger(SqliteStore(tmp_path / "a.db"), now=calendar)
    limits: dict[str, Any] = {field: 2}
    limited = key("a", **limits)
    for _ in range(2):
        await ledger.check(limited)
        ledger.begin(limited, "m", 0).close(ended(prompt_tokens=1))

    with pytest.raises(BudgetError) as refused:
        await ledger.check(limited)
    with pytest.raises(BudgetError):
        ledger.begin(limited, "m", 0)

    answer = response_for(refused.value)
    assert (answer.status, answer.code, answer.kind) == (429, f"{field}_exceeded", field)
    assert answer.message == (
        f"Key a has used 2 of 2 in its budget `{field}`, which renews at {renews_at}."
    )
    assert (b"retry-after", b"30") in answer.headers
    assert (b"x-should-retry", b"false") in answer.headers
    calendar.now += timedelta(seconds=30)
    await ledger.check(limited)
    await ledger.close()


async def test_the_prompts_of_running_requests_count_towards_a_budget(tmp_path: Path) -> None:
    ledger = Ledger(SqliteStore(tmp_path / "a.db"), now=Calendar())
    limited = key("a", tokens_per_day=100)
    tally = ledger.begin(limited, "m", 100)
    with pytest.raises(BudgetError):
        ledger.begin(limited, "m", 1)

    tally.close(ended(prompt_tokens=60))

    ledger.begin(limited, "m", 1).close(ended())
    await ledger.close()


async def test_a_budget_counts_what_other_gateways_have_used(tmp_path: Path) -> None:
    calendar = Calendar()
    first, second = (
        Ledger(SqliteStore(tmp_path / "a.db"), flush_s=1.0, now=calendar) for _ in range(2)
    )
    limited = key("a", requests_per_month=2)
    await second.check(limited)
    for _ in range(2):
        first.begin(limited, "m", 0)
    await first.flush()
    await second.check(limited)  # What it has read is less than `flush_s` old.

    calendar.now += timedelta(seconds=1)

    with pytest.raises(BudgetError):
        await second.check(limited)
    await first.close()
    await second.close()


async def test_without_a_store_nothing_is_counted_or_limited() -> None:
    ledger = Ledger(None)
    limited = key("a", requests_per_day=1)
    for _ in range(3):
        await ledger.check(limited)
        ledger.begin(limited, "m", 5).generated(3)
    await ledger.close()


@pytest.mark.parametrize(
    ("now", "period", "expected"),
    [
        ("2026-11-23T12:00:00", "day", "2026-11-24T00:00:00"),
        ("2026-12-31T23:59:59", "day", "2027-01-01T00:00:00"),
        ("2026-12-01T00:00:00", "month", "2027-01-01T00:00:00"),
        ("2028-02-29T01:00:00", "month", "2028-03-01T00:00:00"),
        ("2026-01-31T01:00:00", "month", "2026-02-01T00:00:00"),
    ],
)
def test_when_a_budget_renews(now: str, period: str, expected: str) -> None:
    assert renewal(period, datetime.fromisoformat(now)) == datetime.fromisoformat(expected)
