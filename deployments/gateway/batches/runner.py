"""Runs batches in a gateway: claims them, checks their input, answers their lines, ends them.

A batch belongs to the gateway that holds its lease. A gateway that dies loses its leases after
`LEASE_S`; another one, or the restarted one, then continues with the lines that have no result.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from deployments.config.batches import BatchesConfig
from deployments.gateway.batches.lines import (
    InputMissingError,
    Line,
    LineChecker,
    answered_result,
    lines_of,
    max_line_bytes,
    request_id_of,
    request_of,
    unanswered_result,
)
from deployments.gateway.batches.records import (
    OUTPUT,
    Batch,
    InputProblem,
    Result,
    Status,
    StoredFile,
)
from deployments.gateway.batches.store import BatchStore, LeaseLostError
from deployments.gateway.callers import Caller
from deployments.gateway.gateway_metrics import LINE_IS_RETRIED
from deployments.wire.errors import ReplicaLostError, StoreError, error_code

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LEASE_S = 15.0
"""Time after which the batches of a dead gateway go to another one."""
POLL_S = 3.0
"""Interval at which a gateway looks for batches that other gateways have created or lost."""
_SWEEP_S = 60.0
_MAX_RUNS = 64
_FIRST_LINES = 8
_GROUP = 256
_CHECKED_BYTES = 2**20
_WRITTEN_BYTES = 2**22
_STORE_PAUSE_S = 1.0
_MIN_PAUSE_S = 0.5
# A deadline of the line's own counts from each attempt on.
_FINAL_CODES = ("deadline_exceeded", "first_token_deadline_exceeded")
# A request may be the cause of the loss; `EnginesDiedError` is not retried at all.
_MAX_LOSSES = 5


class LineCall(NamedTuple):
    """A line's request: `until_s` is when its batch expires (Unix time)."""

    caller: Caller
    path: str
    body: bytes
    request_id: str
    batch_id: str
    until_s: float


class LineAnswer(NamedTuple):
    """The answer to a line's request; `retry_after_s` as in the header, None without one."""

    status: int
    body: bytes
    retry_after_s: float | None = None


class LineServer(Protocol):
    """The gateway, as far as a batch needs it."""

    async def answer_line(self, call: LineCall) -> LineAnswer:
        """Answer a request of a batch at the lowest priority; cancelling cancels the request."""

    async def caller_named(self, name: str) -> Caller | None:
        """Return the owner of a batch, None while no key of this name is in force."""

    def check_model(self, name: object, caller: Caller) -> None:
        """Raise RequestError for a model that the caller cannot use."""

    @property
    def max_body_bytes(self) -> int:
        """Limit on the body of a request."""

    @property
    def max_batch_bytes(self) -> int:
        """Limit on the bodies of all lines in queues and at replicas."""


class BatchMetrics(Protocol):
    """Counts of what the batches do."""

    def batch_line(self, caller: Caller | None, *, has_failed: bool) -> None:
        """Count a line whose result is stored."""

    def batch_ended(self, status: str) -> None:
        """Count a batch that has ended."""

    def batches_open(self, statuses: Sequence[str]) -> None:
        """Note the states of all batches that have not ended."""


class Room:
    """Lines that are in queues and at replicas, of all batches; entered in order of arrival."""

    def __init__(self, server: LineServer, max_lines: int) -> None:
        self._server = server
        self.max_lines = max_lines
        self.num_lines = 0
        self._num_bytes = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def enter(self, num_bytes: int) -> "Entry":
        """Wait for room; a line larger than all room runs alone."""
        entry = Entry(self, num_bytes)
        await entry.enter()
        return entry

    async def _enter(self, num_bytes: int) -> None:
        async with self._turn:
            while self.num_lines and (
                self.num_lines >= self.max_lines
                or self._num_bytes + num_bytes > self._server.max_batch_bytes
            ):
                self._freed.clear()
                await self._freed.wait()
            self.num_lines += 1
            self._num_bytes += num_bytes

    def _leave(self, num_bytes: int) -> None:
        self.num_lines -= 1
        self._num_bytes -= num_bytes
        self._freed.set()


class Entry:
    """The room of one line, which may be left and entered again."""

    def __init__(self, room: Room, num_bytes: int) -> None:
        self._room = room
        self._num_bytes = num_bytes
        self._is_inside = False

    async def enter(self) -> None:
        """Wait for room."""
        await self._room._enter(self._num_bytes)
        self._is_inside = True

    def leave(self) -> None:
        """Give the room back, if it is held."""
        if self._is_inside:
            self._is_inside = False
            self._room._leave(self._num_bytes)


class BatchRunner:
    """The batches that one gateway runs: for each key one after the other, keys side by side."""

    def __init__(
        self,
        store: BatchStore,
        server: LineServer,
        metrics: BatchMetrics,
        config: BatchesConfig,
        *,
        lease_s: float = LEASE_S,
        poll_s: float = POLL_S,
    ) -> None:
        self.store = store
        self.server = server
        self.metrics = metrics
        self.config = config
        self.holder = uuid.uuid4().hex
        self.lease_s = lease_s
        self.room = Room(server, config.lines_at_once)
        self._poll_s = poll_s
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._swept_s = 0.0
        self._is_failing = False

    def configure(self, config: BatchesConfig) -> None:
        """Apply new settings."""
        self.config = config
        self.room.max_lines = config.lines_at_once

    def start(self) -> None:
        """Look for batches from now on."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look_for_ever())

    def look(self) -> None:
        """Look for batches now: one was created."""
        self._wake.set()

    def cancel(self, batch_id: str) -> None:
        """Stop a batch that was cancelled, if it runs here."""
        if run := self._runs.get(batch_id):
            run.stop(Stop.CANCELLED)
        self._wake.set()

    async def close(self) -> None:
        """Stop all batches where they are, and leave them to other gateways."""
        tasks = [*self._tasks, *([] if self._looking is None else [self._looking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def share(self) -> int:
        """Lines that one batch may have in queues and at replicas.

        There is always a share left: the lines of a slow key would keep others out for long.
        """
        answering = sum(run.is_answering for run in self._runs.values())
        return max(1, self.room.max_lines // (answering + 1))

    def has_other(self, batch: Batch) -> bool:
        """Return whether the lines of another batch of the same key run here."""
        return any(
            run.is_answering and run.batch.owner == batch.owner and run.batch.id != batch.id
            for run in self._runs.values()
        )

    async def _look_for_ever(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._look()
                self._is_failing = False
            except (StoreError, TimeoutError) as error:
                if not self._is_failing:
                    logger.error("batches not read", extra={"reason": repr(error)})
                self._is_failing = True
            except Exception:  # Batches would stop for ever.
                logger.exception("batches not read")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()

    async def _look(self) -> None:
        now_s = time.time()
        if now_s - self._swept_s > _SWEEP_S:
            self._swept_s = now_s
            await self.store.sweep(int(now_s), self.config.keep_days * 86_400)
        batches = await self.store.open_batches()
        self.metrics.batches_open([batch.status.value for batch in batches])
        for batch in batches:
            if batch.id in self._runs or len(self._runs) >= _MAX_RUNS:
                continue
            ends = batch.status is Status.CANCELLING or batch.expires_at <= now_s
            caller = await self.server.caller_named(batch.owner)
            if not ends and caller is None:
                continue  # Until a key of this name is in force again, or the batch expires.
            if batch.status is Status.IN_PROGRESS and not ends and self.has_other(batch):
                continue
            if await self.store.claim(batch.id, self.holder, self.lease_s):
                run = self._runs[batch.id] = BatchRun(self, batch, caller)
                task = asyncio.get_running_loop().create_task(self._run(run))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _run(self, run: "BatchRun") -> None:
        batch_id = run.batch.id
        try:
            await run.run()
        except LeaseLostError as error:
            logger.warning("lease of a batch lost", extra={"reason": str(error)})
        except Exception:  # The batch is tried again; others must not stop.
            logger.exception("batch stopped", extra={"batch_id": batch_id})
            await asyncio.sleep(self._poll_s)
        finally:
            # Shielded: this is also how a gateway that stops hands its batches over.
            with suppress(StoreError, TimeoutError):
                await asyncio.shield(self.store.release(batch_id, self.holder))
            del self._runs[batch_id]
            self._wake.set()


class Stop(Enum):
    """Why the lines of a batch stop before their end."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"
    KEY_GONE = "key_gone"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The error of the lines that a stopped batch does not run."""

    code: str
    message: str


_TOO_LONG = _Refusal(
    "line_too_long", "This line is longer than `limits.max_body_bytes` allows now."
)
_REFUSALS = {
    Stop.EXPIRED: _Refusal(
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    Stop.NO_ROOM: _Refusal(
        "storage_limit_exceeded",
        "This request was not executed: the stored files and results reached a limit of "
        "`batches` in the configuration. Delete files and send it again.",
    ),
}
# A batch without room is checked first: its lines then get an error each.
_REFUSED_LATER = (None, Stop.NO_ROOM)


class BatchRun:
    """One batch in the gateway that holds its lease."""

    def __init__(self, runner: BatchRunner, batch: Batch, caller: Caller | None) -> None:
        """`caller` is None only for a batch that must end."""
        self.batch = batch
        self.is_answering = False
        self._runner = runner
        self._store = runner.store
        self._caller = caller
        self._stop: Stop | None = None
        self._stopped = asyncio.Event()
        # Lines that run or wait for a retry, and how many may: see `_answer`.
        self._num_lines = 0
        self._max_lines = _FIRST_LINES
        self._line_ended = asyncio.Event()
        self._resume_s = 0.0
        self._unstored: dict[int, Result] = {}
        self._writing = asyncio.Lock()

    def stop(self, why: Stop) -> None:
        """Stop the lines; the first reason counts."""
        self._stop = self._stop or why
        self._stopped.set()

    async def run(self) -> None:
        """Work on the batch until it ends or must wait. Raises LeaseLostError."""
        work = asyncio.create_task(self._work())
        keeper = asyncio.create_task(self._keep_lease())
        try:
            await asyncio.wait((work, keeper), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, keeper):
                task.cancel()
            await asyncio.gather(work, keeper, return_exceptions=True)
        if not work.cancelled():
            _raise_first(work)
        elif not keeper.cancelled():
            _raise_first(keeper)

    async def _keep_lease(self) -> None:
        """Renew the lease until it is lost; notice what others decide about the batch."""
        runner, batch_id = self._runner, self.batch.id
        renewed_s = time.monotonic()
        while True:
            await asyncio.sleep(runner.lease_s / 4)
            asked_s = time.monotonic()
            try:
                if not await self._store.claim(batch_id, runner.holder, runner.lease_s):
                    break
                renewed_s = asked_s
                await self._look()
            except (StoreError, TimeoutError):
                if time.monotonic() - renewed_s > runner.lease_s:
                    break
        raise LeaseLostError(f"{batch_id} was not renewed")

    async def _look(self) -> None:
        found = await self._store.batch(self.batch.id)
        if found is not None and found[0].status is Status.CANCELLING:
            self.stop(Stop.CANCELLED)
        config = self._runner.config
        stored = await self._store.stored(self.batch.owner)
        if stored.key_bytes > config.max_key_bytes or stored.total_bytes > config.max_total_bytes:
            self.stop(Stop.NO_ROOM)
        if await self._runner.server.caller_named(self.batch.owner) is None:
            self.stop(Stop.KEY_GONE)

    async def _work(self) -> None:
        if self.batch.expires_at <= time.time():
            self.stop(Stop.EXPIRED)
        elif self.batch.status is Status.CANCELLING:
            self.stop(Stop.CANCELLED)
        try:
            if self.batch.status is Status.VALIDATING and self._stop in _REFUSED_LATER:
                await self._validate()
            if self.batch.status is Status.IN_PROGRESS and self._stop is None:
                if self._runner.has_other(self.batch):
                    return
                await self._answer_until_stopped()
            if self._stop is Stop.KEY_GONE:
                return
            if self._stop in _REFUSALS and self.batch.status is Status.IN_PROGRESS:
                await self._refuse_rest(_REFUSALS[self._stop])
        except InputMissingError as error:
            problem = InputProblem(code="input_file_missing", message=str(error))
            await self._change(lambda batch: batch.refused([problem], _now()))
        if self.batch.is_open:
            await self._end()
        self._runner.metrics.batch_ended(self.batch.status.value)

    async def _change(self, change: Callable[[Batch], Batch]) -> None:
        changed = await _patiently(
            lambda: self._store.change(self.batch.id, change, self._runner.holder)
        )
        if changed is None:
            raise LeaseLostError(f"{self.batch.id} does not exist")
        self.batch = changed

    async def _validate(self) -> None:
        """Check the whole input; the batch is then in progress, or has failed."""
        caller, server = self._caller, self._runner.server
        assert caller is not None, "only a batch with a caller is checked"
        max_bytes = max_line_bytes(server.max_body_bytes)
        checker = LineChecker(
            self.batch.endpoint,
            self._runner.config.max_lines,
            max_bytes,
            lambda name: server.check_model(name, caller),
        )

        def check(lines: list[Line]) -> None:
            for line in lines:
                checker.check(line)

        group: list[Line] = []
        num_bytes = 0
        async for line in self._lines(max_bytes):
            group.append(line)
            num_bytes += len(line.text or b"")
            if num_bytes > _CHECKED_BYTES or len(group) >= _GROUP:
                # Parsing would delay the requests that share this event loop.
                await asyncio.to_thread(check, group)
                group, num_bytes = [], 0
                if self._stop not in _REFUSED_LATER:
                    return
                if checker.is_full:
                    break
        await asyncio.to_thread(check, group)
        checker.end()
        if checker.problems:
            await self._change(lambda batch: batch.refused(checker.problems, _now()))
        else:
            await self._change(
                lambda batch: batch.validated(checker.num_lines, checker.last_line, _now())
            )

    async def _answer_until_stopped(self) -> None:
        """Answer the lines without results, until all have one or the batch stops."""
        self.is_answering = True
        lines = asyncio.create_task(self._answer_lines())
        stopped = asyncio.create_task(self._stopped.wait())
        left_s = max(0.0, self.batch.expires_at - time.time())
        timer = asyncio.get_running_loop().call_later(left_s, self.stop, Stop.EXPIRED)
        try:
            await asyncio.wait((lines, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            lines.cancel()
            stopped.cancel()
            await asyncio.gather(lines, stopped, return_exceptions=True)
            self.is_answering = False
        # First: an error must not lose the answers of other lines.
        await self._write_all()
        if not lines.cancelled():
            _raise_first(lines)

    async def _answer_lines(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for line in self._unanswered():
                while self._num_lines >= min(self._max_lines, self._runner.share):
                    self._line_ended.clear()
                    await self._line_ended.wait()
                await asyncio.sleep(max(0.0, self._resume_s - time.monotonic()))
                entry = await self._runner.room.enter(len(line.text or b""))
                self._num_lines += 1
                task = group.create_task(self._answer(line, entry))
                # A task that is cancelled before its first step runs no `finally`.
                task.add_done_callback(partial(self._line_done, entry))

    def _line_done(self, entry: Entry, task: asyncio.Task[None]) -> None:
        entry.leave()
        self._num_lines -= 1
        self._line_ended.set()

    async def _unanswered(self) -> AsyncIterator[Line]:
        """Yield the lines that have no result yet."""
        max_bytes = max_line_bytes(self._runner.server.max_body_bytes)
        answered: set[int] = set()
        known = 0
        async for line in self._lines(max_bytes):
            if line.number > known:
                first, known = line.number, line.number + _GROUP - 1
                answered = await _patiently(
                    partial(self._store.answered, self.batch.id, first, known)
                )
            if line.number not in answered:
                yield line

    def _lines(self, max_bytes: int) -> AsyncIterator[Line]:
        """Yield all lines of the input. Raises InputMissingError."""

        async def chunk(file_id: str, number: int) -> bytes | None:
            return await _patiently(lambda: self._store.chunk(file_id, number))

        return lines_of(chunk, self.batch.input_file_id, max_bytes)

    async def _answer(self, line: Line, entry: Entry) -> None:
        """Answer a line, again and again while the server has no room for it.

        A refusal halves the number of lines that run or wait here, an answer raises it by one.
        """
        batch, server = self.batch, self._runner.server
        if line.text is None:
            await self._add(self._unanswered_result(line, "", _TOO_LONG))
            return
        request = await asyncio.to_thread(request_of, line.text)
        num_losses = 0
        while True:
            caller = await _patiently(lambda: server.caller_named(batch.owner))
            if caller is None:
                self.stop(Stop.KEY_GONE)
                return
            request_id = request_id_of(batch.id, line.number)
            answer = await server.answer_line(
                LineCall(
                    caller, batch.endpoint, request.body, request_id, batch.id, batch.expires_at
                )
            )
            pause_s = self._pause_s(answer)
            num_losses += pause_s is not None and error_code(answer.body) == ReplicaLostError.code
            if pause_s is None or num_losses > _MAX_LOSSES:
                break
            entry.leave()
            self._max_lines = max(1, self._max_lines // 2)
            self._resume_s = max(self._resume_s, time.monotonic() + pause_s)
            await asyncio.sleep(pause_s)
            await entry.enter()
        entry.leave()
        self._max_lines = min(self._max_lines + 1, self._runner.room.max_lines)
        result = answered_result(
            batch.id, line.number, request.custom_id, answer.status, answer.body
        )
        await self._add(result)
        self._runner.metrics.batch_line(caller, has_failed=result.is_error)

    def _pause_s(self, answer: LineAnswer) -> float | None:
        """Return the time until a refused line is sent again; None if its answer is final."""
        if answer.status not in LINE_IS_RETRIED or error_code(answer.body) in _FINAL_CODES:
            return None
        pause_s = max(_MIN_PAUSE_S, answer.retry_after_s or 0.0)
        return pause_s if time.time() + pause_s < self.batch.expires_at else None

    async def _add(self, result: Result) -> None:
        """Store a result, together with those of other lines that end meanwhile."""
        self._unstored[result.line] = result
        # Another line's task may write this one's result too.
        while result.line in self._unstored:
            await self._write()

    async def _write(self) -> None:
        """Write some of the results that are not stored yet."""
        async with self._writing:
            group: list[Result] = []
            num_bytes = 0
            for result in self._unstored.values():
                group.append(result)
                num_bytes += len(result.record)
                if num_bytes > _WRITTEN_BYTES or len(group) >= _GROUP:
                    break
            if group:
                holder = self._runner.holder
                await _patiently(lambda: self._store.add_results(self.batch, holder, group))
            for result in group:
                del self._unstored[result.line]

    async def _refuse_rest(self, refusal: _Refusal) -> None:
        """Give the lines that were not run an error."""
        async for line in self._unanswered():
            custom_id = ""
            if line.text is not None:
                custom_id = (await asyncio.to_thread(request_of, line.text)).custom_id
            result = self._unanswered_result(line, custom_id, refusal)
            self._unstored[line.number] = result
            self._runner.metrics.batch_line(self._caller, has_failed=True)
            if len(self._unstored) >= _GROUP:
                await self._write()
        await self._write_all()

    def _unanswered_result(self, line: Line, custom_id: str, refusal: _Refusal) -> Result:
        return unanswered_result(
            self.batch.id, line.number, custom_id, refusal.code, refusal.message
        )

    async def _write_all(self) -> None:
        while self._unstored:
            await self._write()

    async def _end(self) -> None:
        """Make files of the results, and end the batch."""
        await self._change(lambda batch: batch.answered(_now()))
        found = await _patiently(lambda: self._store.batch(self.batch.id))
        if found is None:
            raise LeaseLostError(f"{self.batch.id} does not exist")
        _, counts = found
        output = await self._file_of(counts.output_bytes, has_errors=False)
        errors = await self._file_of(counts.error_bytes, has_errors=True)
        expired = self._stop is Stop.EXPIRED
        await self._change(lambda batch: batch.ended(_now(), output, errors, expired=expired))

    async def _file_of(self, num_bytes: int, *, has_errors: bool) -> str | None:
        """Show the results of one kind as a file, the same one if this is repeated."""
        if not num_bytes:
            return None
        kind = "error" if has_errors else "output"
        file = StoredFile(
            id=f"file-{self.batch.id.removeprefix('batch_')}-{kind}",
            owner=self.batch.owner,
            filename=f"{self.batch.id}_{kind}.jsonl",
            num_bytes=num_bytes,
            purpose=OUTPUT,
            created_at=_now(),
            expires_at=_now() + self._runner.config.keep_days * 86_400,
            batch_id=self.batch.id,
            has_errors=has_errors,
        )
        await _patiently(lambda: self._store.finish_file(file))
        return file.id


async def _patiently(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Repeat an access to the store while it fails; the lease ends this if it takes too long."""
    while True:
        try:
            return await ask()
        except (StoreError, TimeoutError):
            await asyncio.sleep(_STORE_PAUSE_S)


def _raise_first(task: asyncio.Task[None]) -> None:
    """Raise the error of a task, the first one if it is a group of errors."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error


def _now() -> int:
    return int(time.time())
