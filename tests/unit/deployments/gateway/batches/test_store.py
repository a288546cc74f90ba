"""The stores of files and batches: the same behaviour in SQLite and in Redis."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.gateway.batches.records import Batch, Counts, Page, Result, Status
from deployments.gateway.batches.store import BatchStore, LeaseLostError, Limits, Stored
from tests.fakes.batch_records import ROOMY, batch_of, file_of, uploaded

Open = Callable[[], BatchStore]
LEASE_S = 60.0


async def test_a_file_is_seen_by_other_gateways_once_it_is_complete(open_again: Open) -> None:
    first, second = open_again(), open_again()
    file = file_of(num_bytes=6)
    assert await first.begin_file(file, ROOMY) is None
    await first.append(file.id, 0, b"one\n")
    await first.append(file.id, 1, b"2\n")

    assert await second.file(file.id) is None
    await first.finish_file(file)

    assert await second.file(file.id) == file
    chunks = [await second.chunk(file.id, number) for number in range(3)]
    assert chunks == [b"one\n", b"2\n", None]
    assert await second.stored("a") == Stored(1, 6, 6)
    await second.delete_file(file)
    await first.delete_file(file)  # By two gateways at once.
    assert await first.file(file.id) is None
    assert await first.chunk(file.id, 0) is None
    assert await first.stored("a") == Stored(0, 0, 0)


async def test_a_key_lists_its_own_files_in_pages(open_again: Open) -> None:
    store = open_again()
    files = []
    for number in range(5):
        files.append(await uploaded(store, b"x", purpose="odd" if number % 2 else "batch"))
        await asyncio.sleep(0.002)  # Ids sort by the millisecond.
    await uploaded(store, b"x", owner="b")
    await store.begin_file(file_of("a", 1), ROOMY)  # Not complete.

    assert await store.files("a", Page(limit=10)) == files[::-1]
    assert await store.files("a", Page(files[3].id, 2)) == [files[2], files[1]]
    assert await store.files("a", Page(files[3].id, 2, newest_first=False)) == [files[4]]
    assert await store.files("a", Page(limit=2), "odd") == [files[3], files[1]]
    assert await store.files("c", Page()) == []


@pytest.mark.parametrize(
    "limits", [Limits(1, 100, 100), Limits(9, 15, 100), Limits(9, 100, 19)], ids=str
)
async def test_a_file_over_a_limit_leaves_nothing(open_again: Open, limits: Limits) -> None:
    store = open_again()
    await uploaded(store, b"x" * 10)
    await uploaded(store, b"x" * 5, owner="b")
    file = file_of(num_bytes=6)

    assert await store.begin_file(file, limits) == Stored(1, 10, 15)
    await store.finish_file(file_of("c"))
    assert await store.stored("a") == Stored(1, 10, 15)


async def test_two_gateways_never_hold_a_batch_together(open_again: Open) -> None:
    first, second = open_again(), open_again()
    batch = batch_of()
    assert await first.create(batch, 5, 99)
    assert await second.open_batches() == [batch]

    claims = await asyncio.gather(
        *(store.claim(batch.id, name, LEASE_S) for store, name in ((first, "f"), (second, "s")))
    )
    assert sorted(claims) == [False, True]
    holder, other = ("f", "s") if claims[0] else ("s", "f")
    assert await first.claim(batch.id, holder, LEASE_S)  # Renewed.
    await first.release(batch.id, other)
    assert not await second.claim(batch.id, other, LEASE_S)
    await first.release(batch.id, holder)
    assert await second.claim(batch.id, other, 0.05)
    await asyncio.sleep(0.1)
    assert await first.claim(batch.id, holder, LEASE_S), "a lease ends by itself"


async def test_a_line_is_answered_once_and_only_under_the_lease(open_again: Open) -> None:
    first, second = open_again(), open_again()
    batch = batch_of()
    await first.create(batch, 5, 99)
    await first.claim(batch.id, "f", LEASE_S)
    await first.add_results(batch, "f", [Result(3, False, b"three\n"), Result(1, True, b"bad\n")])
    await first.release(batch.id, "f")

    with pytest.raises(LeaseLostError):
        await first.add_results(batch, "f", [Result(2, False, b"late\n")])
    await second.claim(batch.id, "s", LEASE_S)
    again = [Result(1, False, b"again\n"), Result(2, False, b"two\n"), Result(3, True, b"again\n")]
    await second.add_results(batch, "s", again)
    await second.add_results(batch, "s", again)

    assert await first.answered(batch.id, 2, 9) == {2, 3}
    assert await first.results(batch.id, 1, 9, has_errors=False) == [b"two\n", b"three\n"]
    assert await first.results(batch.id, 1, 9, has_errors=True) == [b"bad\n"]
    assert await first.batch(batch.id) == (batch, Counts(2, 1, 10, 4))
    assert await first.stored("a") == Stored(0, 14, 14)


async def test_changes_of_a_batch_follow_each_other(open_again: Open) -> None:
    first, second = open_again(), open_again()
    batch = batch_of()
    await first.create(batch, 5, 99)
    await first.claim(batch.id, "f", LEASE_S)

    def one_more(batch: Batch) -> Batch:
        return batch.model_copy(update={"num_lines": batch.num_lines + 1})

    await asyncio.gather(
        *(store.change(batch.id, one_more) for store in (first, second) for _ in range(5))
    )
    with pytest.raises(LeaseLostError):
        await second.change(batch.id, one_more, "s")
    cancelled = await second.change(batch.id, lambda batch: batch.cancelled(7))
    ended = await first.change(
        batch.id, lambda batch: batch.ended(9, "file-o", None, expired=False), "f"
    )

    assert cancelled is not None
    assert ended is not None
    assert (ended.num_lines, ended.status) == (10, Status.CANCELLED)
    assert ended.times == {Status.CANCELLING: 7, Status.CANCELLED: 9}
    assert await second.batch(batch.id) == (ended, Counts())
    assert await second.open_batches() == []
    assert not await second.claim(batch.id, "s", LEASE_S), "it has ended"
    assert await second.change("batch_unknown", one_more) is None


async def test_a_key_has_a_limit_on_open_batches_and_lists_its_own(open_again: Open) -> None:
    store = open_again()
    batches = []
    for _ in range(2):
        batches.append(batch_of())
        assert await store.create(batches[-1], 2, 99)
        await asyncio.sleep(0.002)

    assert not await store.create(batch_of(), 2, 99)
    assert await store.create(batch_of(owner="b"), 2, 99)
    assert [batch for batch, _ in await store.batches("a", Page())] == batches[::-1]
    assert [batch for batch, _ in await store.batches("a", Page(batches[1].id))] == batches[:1]
    await store.change(batches[0].id, lambda batch: batch.refused([], 1))
    assert await store.create(batch_of(), 2, 99)


async def test_of_many_batches_the_oldest_without_results_are_forgotten(open_again: Open) -> None:
    store = open_again()
    batches = []
    for _ in range(3):
        batches.append(batch_of())
        await store.create(batches[-1], 9, 9)
        await asyncio.sleep(0.002)
    answered, failed, running = batches
    await store.claim(answered.id, "f", LEASE_S)
    await store.add_results(answered, "f", [Result(1, False, b"x\n")])
    await store.change(answered.id, lambda batch: batch.ended(1, "file-1", None, expired=False))
    await store.change(failed.id, lambda batch: batch.refused([], 1))
    other = batch_of(owner="b")
    await store.create(other, 9, 0)
    await store.change(other.id, lambda batch: batch.refused([], 1))

    last = batch_of()
    await store.create(last, 9, 2)

    kept = {batch.id for batch, _ in await store.batches("a", Page())}
    assert kept == {answered.id, running.id, last.id}
    assert await store.batch(failed.id) is None
    assert await store.batch(other.id) is not None


async def test_what_has_expired_is_deleted_but_not_the_input_of_an_open_batch(
    open_again: Open,
) -> None:
    store = open_again()
    now_s = int(time.time())
    kept = await uploaded(store, b"kept")
    expired = await uploaded(store, b"expired", expires_at=now_s - 1)
    used = await uploaded(store, b"used", expires_at=now_s - 1)
    given_up = file_of(num_bytes=1, created_at=now_s - 10_000)
    await store.begin_file(given_up, ROOMY)
    await store.append(given_up.id, 0, b"x")
    batch, old = batch_of(used.id), batch_of(kept.id)
    await store.create(batch, 5, 99)
    await store.create(old, 5, 99)
    await store.claim(old.id, "f", LEASE_S)
    await store.add_results(old, "f", [Result(1, False, b"x\n")])
    output = file_of(batch_id=old.id, num_bytes=2, purpose="batch_output", expires_at=now_s - 1)
    await store.finish_file(output)
    await store.change(
        old.id, lambda batch: batch.ended(now_s - 99, output.id, None, expired=False)
    )

    await store.sweep(now_s, 200)
    assert await store.batch(old.id) is not None
    assert await store.results(old.id, 1, 9, has_errors=False) == []
    await store.sweep(now_s, 50)

    assert [file.id for file in await store.files("a", Page())] == [used.id, kept.id]
    assert await store.file(expired.id) is None
    assert await store.chunk(given_up.id, 0) is None
    assert await store.batch(old.id) is None
    assert [each.id for each, _ in await store.batches("a", Page())] == [batch.id]
    assert await store.stored("a") == Stored(2, 8, 8)


async def test_deleting_the_results_of_a_batch_frees_their_room(open_again: Open) -> None:
    store = open_again()
    batch = batch_of()
    await store.create(batch, 5, 99)
    await store.claim(batch.id, "f", LEASE_S)
    await store.add_results(batch, "f", [Result(1, False, b"good\n"), Result(2, True, b"bad\n")])
    errors = file_of(batch_id=batch.id, num_bytes=4, purpose="batch_output", has_errors=True)
    await store.finish_file(errors)
    assert await store.stored("a") == Stored(1, 9, 9)

    await store.delete_file(errors)

    assert await store.stored("a") == Stored(0, 5, 5)
    assert await store.results(batch.id, 1, 2, has_errors=True) == []
    assert await store.batch(batch.id) == (batch, Counts(1, 1, 5, 0))


async def test_a_server_without_batches_makes_no_file(tmp_path: Path, open_again: Open) -> None:
    store = open_again()

    assert await store.open_batches() == []
    await store.sweep(int(time.time()), 1)
    assert not os.listdir(tmp_path)  # noqa: PTH208
