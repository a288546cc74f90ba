"""HTTP client of the load test: send a request, read its stream, return a record.

Errors become part of the record and never raise.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from apar_core.errors import validation_summary
from cluster.loadtest.jobs import Job, Target
from cluster.loadtest.run_file import CANCELLED, Answered, RequestRecord

_DONE = b"[DONE]"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")


class StreamError(Exception):
    """The server reported an error within a stream."""


class NotAStreamError(Exception):
    """The response is not a stream of chat completions."""


class _Delta(BaseModel):
    content: str | None = None
    # Reasoning models send their reasoning in separate fields.
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(BaseModel):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Apar(BaseModel):
    model_config = ConfigDict(extra="allow")
    # Extra fields; the figures calculate with the counts among them.
    __pydantic_extra__: dict[str, JsonValue]

    text_tokens: int | None = None
    threads: int | None = None
    decode_steps: int | None = None
    sequential_steps: int | None = None
    attended_tokens: int | None = None
    sequential_attended_tokens: int | None = None
    max_cached_tokens: int | None = None
    sequential_max_cached_tokens: int | None = None


class _Event(BaseModel):
    """The fields of an event that the load test reads; pings and usage come without choices."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    apar: _Apar | None = None
    error: JsonValue = None


_NO_DELTA = _Delta()


@dataclass(slots=True)
class EventLines:
    """Incremental parser of server-sent events.

    Source: the HTML standard, "Interpreting an event stream", without ids and reconnection.
    """

    _rest: bytes = b""
    _after_carriage_return: bool = False
    _kind: bytes = b""
    _data: list[bytes] = field(default_factory=list)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (type, data) of each event that is complete; the type is empty by default."""
        if not data:
            return
        if self._after_carriage_return:
            data = data.removeprefix(b"\n")
        self._after_carriage_return = data.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + data)
        for line in lines:
            name, _, value = line.partition(b":")
            if not line:
                kind, self._kind = self._kind, b""
                payload, self._data = b"\n".join(self._data), []
                if payload:
                    yield kind, payload
            elif name.removeprefix(_BYTE_ORDER_MARK) == b"data":
                self._data.append(value.removeprefix(b" "))
            elif name == b"event":
                self._kind = value.removeprefix(b" ")


@dataclass(slots=True)
class ResponseStream:
    """Incremental parser of a chat completion stream.

    `pieces` holds (time, characters) per chunk of text. `paragraph_s` is the time when the first
    paragraph and its line break were complete. `last_s` is the time of the last chunk with a
    choice; only usage may follow.
    """

    pieces: list[tuple[float, int]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    characters: int = 0
    paragraph_s: float | None = None
    last_s: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    apar: dict[str, Any] | None = None
    done: bool = False
    _events: EventLines = field(default_factory=EventLines)
    _begun: bool = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse bytes received at `now_s`. Raises StreamError and NotAStreamError."""
        for kind, payload in self._events.feed(data):
            if kind != b"ping":
                self._take(kind, payload.strip(), now_s)

    @property
    def whole(self) -> bool:
        """Whether the answer is complete."""
        return self.done or self.finish_reason is not None

    def _take(self, kind: bytes, payload: bytes, now_s: float) -> None:
        if payload == _DONE:
            self.done = True
            return
        if kind == b"error":
            raise StreamError(_reason(payload))
        try:
            event = _Event.model_validate_json(payload)
        except ValidationError as problem:
            shown = payload[:80].decode(errors="replace")
            raise NotAStreamError(
                f"an event is not a chat completion chunk: {validation_summary(problem)}: {shown}"
            ) from problem
        if event.error is not None:
            error = event.error
            raise StreamError(str(error.get("message") if isinstance(error, dict) else error))
        self._take_event(event, now_s)

    def _take_event(self, event: _Event, now_s: float) -> None:
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.completion_tokens = event.usage.completion_tokens
        if event.apar is not None:
            self.apar = event.apar.model_dump(exclude_none=True)
        for choice in event.choices or ():
            self.last_s = now_s
            delta = choice.delta or _NO_DELTA
            text = delta.content or delta.reasoning_content or delta.reasoning
            if text:
                self._take_text(text, now_s)
            self.finish_reason = choice.finish_reason or self.finish_reason

    def _take_text(self, text: str, now_s: float) -> None:
        self.pieces.append((round(now_s, 5), len(text)))
        self.text.append(text)
        self.characters += len(text)
        if self.paragraph_s is not None:
            return
        shown = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(shown)
        if self._begun and "\n" in shown:
            self.paragraph_s = round(now_s, 5)


# Servers close idle connections after 5 s (uvicorn) or later. Close them earlier, or a request may
# be lost on a connection that is being closed.
_KEEP_S = 3.0
_CONNECT_S = 10.0
_LAST_BYTES_S = 1.0
_STREAM_TYPE = "text/event-stream"


@dataclass(slots=True, eq=False)
class Attempt:
    """A running request; `started_s` is on time.perf_counter's clock."""

    job: Job
    started_s: float
    stream: ResponseStream = field(default_factory=ResponseStream)
    status: int | None = None
    error: str | None = None
    message: str | None = None

    def fail(self, kind: str, reason: object) -> None:
        """Record why there is no complete answer."""
        self.error, self.message = kind, str(reason)[:300] or None


class LoadClient:
    """Client with an unlimited connection pool. Use as an async context manager.

    Requests are never retried, because an error response is a result. `timeout_s` limits the total
    time of a request. `under_way` contains the running requests.
    """

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self.under_way: set[Attempt] = set()

    async def __aenter__(self) -> LoadClient:
        _allow_many_connections()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_S),
            headers={**self._target.headers, "Content-Type": "application/json"},
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(
        self, job: Job, *, repeat: int, index: int, start_s: float, planned_s: float | None
    ) -> Answered:
        """Send a job; `start_s` is the start of the repeat on time.perf_counter's clock.

        If the task is cancelled, return a record with the error CANCELLED at once.
        """
        attempt = Attempt(job, time.perf_counter())
        self.under_way.add(attempt)
        try:
            await self._follow(attempt)
        except asyncio.CancelledError:
            attempt.fail(CANCELLED, "the run was interrupted while the request was running")
        finally:
            self.under_way.discard(attempt)
        end_s = time.perf_counter() - attempt.started_s
        if attempt.error is None and attempt.stream.last_s is not None:
            # Like other clients, ignore the final usage chunk, which may be delayed.
            end_s = attempt.stream.last_s
        record = _record(
            attempt,
            repeat=repeat,
            index=index,
            planned_s=None if planned_s is None else round(planned_s, 5),
            sent_s=round(attempt.started_s - start_s, 5),
            end_s=round(end_s, 5),
        )
        return Answered(record, job.messages, "".join(attempt.stream.text))

    async def _follow(self, attempt: Attempt) -> None:
        assert self._session is not None
        try:
            async with self._session.post(self._target.chat_url, data=attempt.job.body) as answer:
                attempt.status = answer.status
                if answer.status != 200:
                    attempt.fail(f"http_{answer.status}", _reason(await answer.read()))
                elif answer.content_type != _STREAM_TYPE:
                    attempt.fail("not_a_stream", f"the response is {answer.content_type}")
                else:
                    await _read(answer.content, attempt)
        except aiohttp.ConnectionTimeoutError as error:
            attempt.fail("connection", error)
        except TimeoutError:
            attempt.fail("timeout", f"no complete answer within {self._timeout_s:g} s")
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
            # A complete answer stays valid if the connection breaks afterwards.
            if not attempt.stream.whole:
                attempt.fail("cut", error)
        except aiohttp.ClientConnectionError as error:
            kind = "cut" if attempt.status is not None else "connection"
            attempt.fail(kind, error)
        except aiohttp.ClientError as error:
            attempt.fail("http", error)


async def _read(content: aiohttp.StreamReader, attempt: Attempt) -> None:
    stream, started_s = attempt.stream, attempt.started_s
    clock: Callable[[], float] = time.perf_counter
    try:
        async for data in content.iter_any():
            stream.feed(data, clock() - started_s)
            if stream.done:
                break
    except StreamError as error:
        attempt.fail("stream_error", error)
    except NotAStreamError as error:
        attempt.fail("not_a_stream", error)
    else:
        if not stream.whole:
            attempt.fail("cut", "the stream ended before the answer")
        # Read to the end, so that the connection can be reused.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_BYTES_S):
                await content.read()


def _record(attempt: Attempt, **times: Any) -> RequestRecord:
    stream = attempt.stream
    apar = stream.apar or {}
    counted = apar.get("text_tokens", stream.completion_tokens)
    expected = attempt.job.text_tokens
    if attempt.error is None and expected is not None and counted != expected:
        attempt.fail("not_replayed", f"{counted} text tokens instead of {expected}")
    return RequestRecord(
        **times,
        id=attempt.job.id,
        category=attempt.job.category,
        pieces=stream.pieces,
        # The end of the answer ends its only paragraph.
        paragraph_s=stream.paragraph_s
        or (times["end_s"] if attempt.error is None and stream.pieces else None),
        status=attempt.status,
        finish_reason=stream.finish_reason,
        prompt_tokens=stream.prompt_tokens,
        text_tokens=len(stream.pieces) if counted is None else counted,
        counted=counted is not None,
        error=attempt.error,
        message=attempt.message,
        apar=stream.apar,
    )


def _reason(body: bytes) -> str:
    """Return the message of an OpenAI error body, or the beginning of any other body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")


def _allow_many_connections() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
