"""Batches on one or two gateways: every line is answered once, whatever stops them."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from apar_core.errors import RequestError
from deployments.config.batches import BatchesConfig
from deployments.config.keys import KeyConfig, hash_of
from deployments.gateway.batches.records import Batch, Status
from deployments.gateway.batches.runner import BatchRunner, LineAnswer, LineCall
from deployments.gateway.batches.store import BatchStore, LeaseLostError
from deployments.gateway.callers import Caller
from deployments.gateway.gateway_metrics import GatewayMetrics
from deployments.metrics import catalogue
from deployments.wire.errors import StoreError
from tests.fakes.batch_records import batch_of, jsonl, line_of, uploaded
from tests.fakes.waiting import LIMIT_S, until

Open = Callable[[], BatchStore]
Answering = Callable[[LineCall], Awaitable[LineAnswer]]


async def at_once(call: LineCall) -> LineAnswer:
    return LineAnswer(200, call.body)


class Gateway:
    """A gateway that answers each line with its request, unless told otherwise."""

    max_body_bytes = 1000
    max_batch_bytes = 10_000

    def __init__(
        self,
        store: BatchStore,
        answering: Answering = at_once,
        lease_s: float = 30.0,
        **config: Any,
    ) -> None:
        self.calls: list[LineCall] = []
        self.most = self._num = 0
        self.answering = answering
        self.names = {"a", "b"}
        self.metrics = GatewayMetrics()
        self.runner = BatchRunner(
            store, self, self.metrics, BatchesConfig(**config), lease_s=lease_s, poll_s=0.05
        )
        self.runner.start()

    async def answer_line(self, call: LineCall) -> LineAnswer:
        self.calls.append(call)
        self._num += 1
        self.most = max(self.most, self._num)
        try:
            return await self.answering(call)
        finally:
            self._num -= 1

    async def caller_named(self, name: str) -> Caller | None:
        key = KeyConfig(name=name or "x", hash=hash_of(name))
        return Caller(name, key) if name in self.names else None

    def check_model(self, name: object, caller: Caller) -> None:
        if name != "m":
            raise RequestError("`model` is not served", param="model")

    def kill(self) -> None:
        """End like a killed process: nothing is given back."""
        for task in (*self.runner._tasks, self.runner._looking):
            if task is not None:
                task.cancel()
        self.runner.store = Dead()


class Dead:
    """The store of a gateway that is no more."""

    def __getattr__(self, name: str) -> Any:
        async def fail(*arguments: object) -> None:
            raise StoreError("killed")

        return fail


async def created(
    store: BatchStore, lines: int | list[dict[str, Any]], owner: str = "a", **fields: Any
) -> Batch:
    """A batch of so many lines."""
    if isinstance(lines, int):
        lines = [line_of(str(number)) for number in range(1, lines + 1)]
    file = await uploaded(store, jsonl(lines), owner)
    batch = batch_of(file.id, owner, **fields)
    assert await store.create(batch, 99, 99)
    return batch


async def ended(store: BatchStore, batch: Batch) -> Batch:
    """Wait for the end of a batch, and return it."""
    return await in_state(store, batch, lambda batch: not batch.is_open)


async def in_state(store: BatchStore, batch: Batch, holds: Callable[[Batch], bool]) -> Batch:
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = await store.batch(batch.id)
            assert found is not None
            if holds(found[0]):
                return found[0]
            await asyncio.sleep(0.01)


async def results(store: BatchStore, batch: Batch, *, has_errors: bool = False) -> list[Any]:
    records = await store.results(batch.id, 1, batch.last_line, has_errors=has_errors)
    return [json.loads(record) for record in records]


async def test_a_batch_is_checked_answered_and_ended(open_again: Open) -> None:
    store = open_again()
    gateway = Gateway(store)
    lines = [line_of("first"), line_of("second"), line_of("third")]
    batch = await created(store, lines)

    done = await ended(store, batch)

    assert done.status is Status.COMPLETED
    assert (done.num_lines, done.error_file_id) == (3, None)
    assert [each["custom_id"] for each in await results(store, done)] == [
        "first",
        "second",
        "third",
    ]
    answers = [each["response"] for each in await results(store, done)]
    assert [answer["body"] for answer in answers] == [line["body"] for line in lines]
    assert {answer["status_code"] for answer in answers} == {200}
    assert list(done.times) == [Status.IN_PROGRESS, Status.FINALIZING, Status.COMPLETED]
    assert done.output_file_id is not None
    output = await store.file(done.output_file_id)
    assert output is not None
    records = await store.results(batch.id, 1, 3, has_errors=False)
    assert output.num_bytes == len(b"".join(records))
    value = gateway.metrics.recorder.value
    assert value(catalogue.BATCH_LINES, key_class="default", outcome="completed") == 3
    await until(lambda: value(catalogue.BATCHES_ENDED, outcome="completed") == 1)
    await gateway.runner.close()


async def test_an_invalid_input_fails_before_any_line_runs(open_again: Open) -> None:
    store = open_again()
    gateway = Gateway(store)
    lines = [line_of("1"), line_of("1"), line_of("3", body={"model": "none"})]

    done = await ended(store, await created(store, lines))

    assert done.status is Status.FAILED
    assert [(each.line, each.param) for each in done.problems] == [
        (2, "custom_id"),
        (3, "body.model"),
    ]
    assert gateway.calls == []
    missing = await ended(store, await _without_input(store))
    assert [each.code for each in missing.problems] == ["input_file_missing"]
    await gateway.runner.close()


async def _without_input(store: BatchStore) -> Batch:
    batch = batch_of("file-unknown")
    await store.create(batch, 99, 99)
    return batch


async def test_a_killed_gateways_batch_goes_on_at_another_one(open_again: Open) -> None:
    num_lines = 120
    gate = asyncio.Semaphore(40)

    async def slowly(call: LineCall) -> LineAnswer:
        await gate.acquire()
        return LineAnswer(200, call.body)

    first = Gateway(open_again(), slowly, lease_s=1.0)
    store = open_again()
    batch = await created(store, num_lines)
    while (found := await store.batch(batch.id)) is None or found[1].completed < 40:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    first.kill()
    stored = await store.answered(batch.id, 1, num_lines)
    second = Gateway(open_again())

    done = await ended(store, batch)

    assert done.status is Status.COMPLETED
    ids = [each["custom_id"] for each in await results(store, done)]
    assert ids == [str(number) for number in range(1, num_lines + 1)]
    asked = {int(call.request_id.rpartition("-")[2]) for call in second.calls}
    assert len(stored) >= 40
    assert asked == set(range(1, num_lines + 1)) - stored, "answered lines are not run again"
    assert len(second.calls) == len(asked)
    await second.runner.close()


async def test_two_gateways_share_batches_and_answer_each_line_once(open_again: Open) -> None:
    store = open_again()
    batches = [await created(store, 40, owner) for owner in ("a", "b", "a", "b")]
    gateways = [Gateway(open_again()) for _ in range(2)]

    for batch in batches:
        done = await ended(store, batch)
        assert [each["custom_id"] for each in await results(store, done)] == [
            str(number) for number in range(1, 41)
        ]
    calls = Counter(call.request_id for gateway in gateways for call in gateway.calls)
    assert len(calls) == 160
    assert set(calls.values()) == {1}
    for gateway in gateways:
        await gateway.runner.close()


async def test_a_gateway_that_stops_hands_its_batch_over_at_once(open_again: Open) -> None:
    async def never(call: LineCall) -> LineAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    store = open_again()
    first = Gateway(open_again(), never, lease_s=10 * LIMIT_S)
    batch = await created(store, 5)
    await until(lambda: len(first.calls) == 5)

    await first.runner.close()
    second = Gateway(open_again())

    assert (await ended(store, batch)).status is Status.COMPLETED
    await second.runner.close()


async def test_lines_that_are_refused_for_lack_of_room_run_later(open_again: Open) -> None:
    seen: Counter[str] = Counter()

    async def busy(call: LineCall) -> LineAnswer:
        seen[call.request_id] += 1
        if seen[call.request_id] < 3:
            return LineAnswer(429 if seen[call.request_id] == 1 else 503, b"{}", 0.01)
        return LineAnswer(200, call.body)

    store = open_again()
    gateway = Gateway(store, busy)
    done = await ended(store, await created(store, 10))

    assert done.status is Status.COMPLETED
    assert len(await results(store, done)) == 10
    assert set(seen.values()) == {3}
    await gateway.runner.close()


async def test_final_answers_and_errors_go_to_their_own_files(open_again: Open) -> None:
    async def mixed(call: LineCall) -> LineAnswer:
        number = int(call.request_id.rpartition("-")[2])
        if number == 1:
            # A budget that renews after the end of the batch.
            return LineAnswer(429, b'{"error": {"code": "tokens_per_month_exceeded"}}', 1e6)
        if number == 2:
            return LineAnswer(503, b'{"error": {"code": "engine_lost"}}', 0.01)
        if number == 3:
            return LineAnswer(503, b'{"error": {"code": "deadline_exceeded"}}', 1.0)
        return LineAnswer(400 if number == 4 else 200, b"{}")

    store = open_again()
    gateway = Gateway(store, mixed)
    done = await ended(store, await created(store, 5))

    assert done.status is Status.COMPLETED
    assert [each["custom_id"] for each in await results(store, done)] == ["5"]
    errors = await results(store, done, has_errors=True)
    assert [each["response"]["status_code"] for each in errors] == [429, 503, 503, 400]
    # The request may be what stops the engines.
    assert sum(call.request_id.endswith("-2") for call in gateway.calls) == 6
    assert len(gateway.calls) == 10
    await gateway.runner.close()


async def test_a_cancelled_batch_keeps_what_was_answered(open_again: Open) -> None:
    async def some(call: LineCall) -> LineAnswer:
        if int(call.request_id.rpartition("-")[2]) > 3:
            await asyncio.Event().wait()
        return LineAnswer(200, call.body)

    store, other = open_again(), open_again()
    gateway = Gateway(store, some, lease_s=0.4)
    batch = await created(store, 20)
    while len(await store.answered(batch.id, 1, 20)) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)

    # At another gateway: this one notices when it renews its lease.
    await other.change(batch.id, lambda batch: batch.cancelled(int(time.time())))
    done = await ended(store, batch)

    assert done.status is Status.CANCELLED
    assert [each["custom_id"] for each in await results(store, done)] == ["1", "2", "3"]
    assert done.error_file_id is None
    await until(lambda: gateway.runner.room.num_lines == 0)
    waiting = await created(store, 5)
    await store.change(waiting.id, lambda batch: batch.cancelled(int(time.time())))
    assert (await ended(store, waiting)).status is Status.CANCELLED
    await gateway.runner.close()


async def test_the_rest_of_an_expired_batch_gets_an_error_each(open_again: Open) -> None:
    async def some(call: LineCall) -> LineAnswer:
        if int(call.request_id.rpartition("-")[2]) > 3:
            await asyncio.Event().wait()
        return LineAnswer(200, call.body)

    store = open_again()
    gateway = Gateway(store, some)
    batch = await created(store, 300, expires_at=int(time.time()) + 4)

    done = await ended(store, batch)

    assert done.status is Status.EXPIRED
    good, errors = await results(store, done), await results(store, done, has_errors=True)
    if done.num_lines:  # Otherwise the machine is too busy to check the input in time.
        ids = [each["custom_id"] for each in (*good, *errors)]
        assert ids == [str(each) for each in range(1, 301)]
    assert {each["error"]["code"] for each in errors} <= {"batch_expired"}
    await gateway.runner.close()


async def test_a_batch_that_expired_without_a_gateway_ends_at_the_next_one(
    open_again: Open,
) -> None:
    store = open_again()
    batch = await created(store, 5)
    await store.change(
        batch.id,
        lambda batch: batch.validated(5, 5, 0).model_copy(update={"expires_at": 1}),
    )
    gateway = Gateway(store)

    done = await ended(store, batch)

    assert (done.status, gateway.calls) == (Status.EXPIRED, [])
    errors = await results(store, done, has_errors=True)
    assert [each["error"]["code"] for each in errors] == ["batch_expired"] * 5
    await gateway.runner.close()


async def test_a_batch_waits_while_its_key_is_not_in_force(open_again: Open) -> None:
    store = open_again()
    gateway = Gateway(store)
    gateway.names = {"b"}
    batch, other = await created(store, 3), await created(store, 3, "b")

    assert (await ended(store, other)).status is Status.COMPLETED
    found = await store.batch(batch.id)
    assert found is not None
    assert found[0].status is Status.VALIDATING
    gateway.names = {"a"}
    assert (await ended(store, batch)).status is Status.COMPLETED
    gateway.names = set()
    late = await created(store, 3, expires_at=int(time.time()) - 1)
    assert (await ended(store, late)).status is Status.EXPIRED
    await gateway.runner.close()


async def test_a_key_that_has_stored_too_much_gets_errors_instead(open_again: Open) -> None:
    async def some(call: LineCall) -> LineAnswer:
        if int(call.request_id.rpartition("-")[2]) > 3:
            await asyncio.Event().wait()
        return LineAnswer(200, b'"' + b"x" * 5000 + b'"')

    store = open_again()
    gateway = Gateway(store, some, lease_s=0.4, max_file_bytes=10_000, max_key_bytes=15_000)
    done = await ended(store, await created(store, 20))

    assert done.status is Status.COMPLETED
    assert len(await results(store, done)) == 3
    errors = await results(store, done, has_errors=True)
    assert {each["error"]["code"] for each in errors} == {"storage_limit_exceeded"}
    assert len(errors) == 17
    await gateway.runner.close()


async def test_one_key_after_the_other_and_within_the_room(open_again: Open) -> None:
    async def turn(call: LineCall) -> LineAnswer:
        await asyncio.sleep(0.001)
        return LineAnswer(200, call.body)

    store = open_again()
    gateway = Gateway(store, turn, lines_at_once=10)
    first, second, third = [await created(store, 100, owner) for owner in ("a", "a", "b")]
    for batch in (first, second, third):
        await ended(store, batch)

    order = [call.batch_id for call in gateway.calls]
    assert gateway.most <= 10
    last_of_first = len(order) - 1 - order[::-1].index(first.id)
    assert order.index(second.id) > last_of_first
    assert order.index(third.id) < last_of_first, "keys run side by side"
    assert gateway.runner.room.num_lines == 0
    await gateway.runner.close()


async def test_lines_that_hang_leave_the_batches_of_other_keys_a_share(open_again: Open) -> None:
    resumed = asyncio.Event()

    async def hang(call: LineCall) -> LineAnswer:
        if call.caller.name == "a":
            await resumed.wait()
        return LineAnswer(200, call.body)

    store = open_again()
    gateway = Gateway(store, hang, lines_at_once=12)
    slow = await created(store, 60, "a")
    # One running batch of two shares: a half of all lines.
    await until(lambda: len(gateway.calls) == 6)

    quick = await created(store, 30, "b")
    done = await ended(store, quick)

    assert done.status is Status.COMPLETED
    assert gateway.runner.room.num_lines == 6
    assert Counter(call.batch_id for call in gateway.calls) == {slow.id: 6, quick.id: 30}
    resumed.set()
    assert (await ended(store, slow)).status is Status.COMPLETED
    assert gateway.most <= 12
    await gateway.runner.close()


class Flaky:
    """A store, or a gateway's keys, that fails every third time it is asked."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._num = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name in ("release", "close"):
            return method

        async def sometimes(*arguments: Any) -> Any:
            self._num += 1
            if self._num % 3 == 0:
                raise StoreError("a test")
            answer = await method(*arguments)
            if self._num % 5 == 0 and name == "add_results":
                raise StoreError("written, but the answer is lost")
            return answer

        return sometimes


async def test_a_store_that_fails_now_and_then_loses_and_repeats_nothing(
    open_again: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.gateway.batches.runner._STORE_PAUSE_S", 0.01)
    store = open_again()
    flaky: Any = Flaky(open_again())
    gateway = Gateway(flaky)
    callers: Any = Flaky(gateway)
    monkeypatch.setattr(gateway, "caller_named", callers.caller_named)
    done = await ended(store, await created(store, 100))

    assert done.status is Status.COMPLETED
    assert len(gateway.calls) == 100
    ids = [each["custom_id"] for each in await results(store, done)]
    assert ids == [str(number) for number in range(1, 101)]
    found = await store.batch(done.id)
    assert found is not None
    assert (found[1].completed, found[1].failed) == (100, 0)
    await gateway.runner.close()


async def test_results_after_the_loss_of_the_lease_are_not_written(open_again: Open) -> None:
    store = open_again()
    batch = await created(store, 1)
    assert await store.claim(batch.id, "first", 30.0)
    gateway = Gateway(store)
    await asyncio.sleep(0.3)
    assert gateway.calls == []

    with pytest.raises(LeaseLostError):
        await store.change(batch.id, lambda batch: batch, gateway.runner.holder)
    await store.release(batch.id, "first")
    assert (await ended(store, batch)).status is Status.COMPLETED
    await gateway.runner.close()
