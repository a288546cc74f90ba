"""Brings a replica's answer to the client: whole or piece by piece, and always to an end.

A request whose replica is lost before the client has got anything is sent again, unseen; a stream
that has begun goes on at another replica. What can be neither ends with an error, a stream with an
error event and `[DONE]`, never with a cut connection or a hang.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.types import Send

from apar_core.errors import EngineError
from apar_core.journal import Journal, JournalBook
from cluster.config.retries import RetryConfig
from deployments.gateway.body import BodyTooLargeError
from deployments.relay.continuation import ClientStream, can_continue
from deployments.wire.answer import AnswerEnd, AnswerStart, Headers, Piece
from deployments.wire.errors import (
    DONE_EVENT,
    ErrorAnswer,
    body_too_large,
    engine_lost,
    engine_lost_twice,
    error_summary,
    internal_error,
    normalised,
    replica_unavailable,
)
from deployments.wire.request import RelayedRequest

# A replica whose engine has died still takes requests for most of a second.
_FIRST_PAUSE_S = 0.1
_PAUSE_GROWTH = 4
_LONGEST_PAUSE_S = 2.0
# One death may be chance. A request that kills engines must not reach all of them.
_MAX_DEATHS = 2


class ReplicaLostError(EngineError):
    """The replica died, hands its requests over, or cannot be reached, while it held a request.

    `engine_died` says that the replica told of its engine's death. `replica` is its id where that
    is known.
    """

    def __init__(
        self, message: str, *, engine_died: bool = False, replica: str | None = None
    ) -> None:
        super().__init__(message)
        self.engine_died = engine_died
        self.replica = replica


class ReplicaBrokenError(ReplicaLostError):
    """The replica said itself that it cannot go on."""


class EnginesDiedError(ReplicaLostError):
    """So many engines died under a request that it may be the cause, and is not sent again."""


class NoReplicaError(ReplicaLostError):
    """No replica has taken the request for so long that it will not be tried again."""


@dataclass(slots=True)
class RetryCounters:
    """What became of requests whose replica was lost, since the start.

    `retried` were sent again from the start, `continued` taken up in the middle of their stream;
    a request may be either several times. `given_up` got an error.
    """

    retried: int = 0
    continued: int = 0
    given_up: int = 0


class Retries:
    """The rule for all requests of one model, and their counters."""

    def __init__(
        self, config: RetryConfig | None = None, *, first_pause_s: float = _FIRST_PAUSE_S
    ) -> None:
        self.config = config or RetryConfig()
        self.first_pause_s = first_pause_s
        self.counters = RetryCounters()

    def attempts(self) -> Attempts:
        """The attempts of one request."""
        return Attempts(self)


class Attempts:
    """How often one request has been sent, and how many engines have died under it."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._num_lost = 0
        # A replica takes requests for a moment after its engine has died; that is one death.
        self._dead: set[str | int] = set()

    async def another(self, error: ReplicaLostError, *, continued: bool) -> None:
        """Wait a little before the next attempt; raises the error where there may be none."""
        self._num_lost += 1
        if error.engine_died:
            self._dead.add(error.replica or self._num_lost)
        if len(self._dead) >= _MAX_DEATHS:
            self.give_up(EnginesDiedError(f"{len(self._dead)} engines died, the last: {error}"))
        counters = self._retries.counters
        if self._num_lost > self._retries.config.max_retries or isinstance(error, NoReplicaError):
            self.give_up(error)
        if continued:
            counters.continued += 1
        else:
            counters.retried += 1
        pause_s = self._retries.first_pause_s * _PAUSE_GROWTH ** (self._num_lost - 1)
        await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))

    def give_up(self, error: ReplicaLostError) -> None:
        """Raise the error, and count it."""
        self._retries.counters.given_up += 1
        raise error


# The server before us sets these for its own connection.
_HOP_HEADERS = (b"content-length", b"connection", b"transfer-encoding", b"date", b"server")


async def send_start(send: Send, status: int, headers: Headers) -> None:
    """Send the status and headers of an answer that comes in pieces."""
    kept = [item for item in headers if item[0].lower() not in _HOP_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": kept})


async def send_piece(send: Send, body: bytes) -> None:
    """Send a piece of the body, if there is anything in it."""
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def send_end(send: Send) -> None:
    """End an answer that came in pieces."""
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_whole(send: Send, answer: AnswerStart) -> None:
    """Send an answer in one piece, an error in OpenAI's form."""
    body = normalised(answer.status, answer.body) if answer.status >= 400 else answer.body
    kept = [item for item in answer.headers if item[0].lower() not in _HOP_HEADERS]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": answer.status, "headers": [*kept, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, answer: ErrorAnswer) -> None:
    """Send an error of our own."""
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


Parts = AsyncGenerator[AnswerStart | Piece | AnswerEnd, None]


__all__ = [
    "Progress",
    "ReplicaCalls",
    "ReplicaLostError",
    "Watch",
    "relay_answer",
    "send_error",
    "send_whole",
    "whole_answer",
]

logger = logging.getLogger(__name__)


Progress = Callable[[int], None]
"""Told how many more tokens a request has generated."""


class ReplicaCalls(Protocol):
    """The calls that a gateway makes, over a Ray Serve handle or directly.

    Both raise ReplicaLostError where no replica answers, or the one that did is gone.
    """

    @property
    def num_running(self) -> int:
        """Replicas that run, as far as is known here; where none does, a call starts one."""

    def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[AnswerStart | Piece | AnswerEnd, None]:
        """The answer piece by piece; closing the iterator cancels the request."""

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[AnswerStart, AnswerEnd]:
        """The answer in one piece, and its cost; cancelling the call cancels the request.

        `progress` is told of tokens now and then, not of all: the cost has them all.
        """


class Watch(Protocol):
    """Who wants to know how an answer gets on."""

    def progress(self, num_tokens: int) -> None:
        """The request has generated so many more tokens, of all its threads together.

        A stream tells with each piece; a whole answer now and then, and of the rest at its end.
        What is generated again after the loss of a replica counts once.
        """

    def retried(self, *, continued: bool) -> None:
        """A replica was lost and the request goes to another, from the start or continued."""

    def ended(self, end: AnswerEnd | None) -> None:
        """Called once, at the last: the cost, or None where nobody knows it."""


class StreamRelay:
    """One streamed request, at one replica after another if it must be."""

    def __init__(self, request: RelayedRequest, send: Send, watch: Watch, retries: Retries) -> None:
        terms = replace(request.terms, keeps_journal=retries.config.continue_streams)
        self._request = replace(request, terms=terms)
        self._send = send
        self._watch = watch
        self._retries = retries
        self._stream = ClientStream()
        self._journal = JournalBook()
        self._continuable = False
        # What ends the stream. A client may leave once it has it, and what the answer has cost
        # comes behind it.
        self._last = b""
        self.begun = False
        """Whether the client has got the start of its answer."""
        self.end: AnswerEnd | None = None
        """What the answer has cost, once that is known."""

    async def run(self, replicas: ReplicaCalls) -> None:
        """Relay the answer to its end.

        Raises what went wrong where no replica can help. Once the stream has begun, `end_with`
        must then end it.
        """
        attempts = self._retries.attempts()
        while True:
            try:
                async with aclosing(replicas.stream(self._request)) as parts:
                    return await self._relay(parts)
            except ReplicaLostError as error:
                if self.begun:
                    if self._stream.complete:
                        await self._finish()
                        return
                    if not (self._continuable and can_continue(self._request)):
                        attempts.give_up(error)
                await attempts.another(error, continued=self.begun)
                self._watch.retried(continued=self.begun)
                if self.begun:
                    self._go_on()

    async def end_with(self, error: ErrorAnswer) -> None:
        """End a stream that has begun with an error event."""
        if not self._stream.complete:
            self._last = error.events
        await self._finish()

    async def _finish(self) -> None:
        await send_piece(self._send, self._last)
        await send_end(self._send)

    def _go_on(self) -> None:
        """Let the next replica begin where the last one was lost."""
        terms = replace(self._request.terms, resume=self._journal.journal())
        self._request = replace(self._request, terms=terms)
        self._stream.begin_again()

    async def _relay(self, parts: Parts) -> None:
        start = await anext(parts)
        if not isinstance(start, AnswerStart):
            raise TypeError("a replica's answer must begin with its start")
        if start.status >= 400:
            await self._refused(start, parts)
            return
        self._continuable = start.continuable
        if not self.begun:
            await send_start(self._send, start.status, start.headers)
            self.begun = True
        await self._pass_on(start.body, start.journal, start.num_tokens)
        async for part in parts:
            if isinstance(part, Piece):
                await self._pass_on(part.body, part.journal, part.num_tokens)
            elif isinstance(part, AnswerEnd):
                self.end = part
        self._last += self._stream.flush()
        await self._finish()

    async def _refused(self, start: AnswerStart, parts: Parts) -> None:
        """Pass on an error answer; raises ReplicaLostError for one to a stream that has begun."""
        rest = [part.body async for part in parts if isinstance(part, Piece)]
        body = b"".join([start.body, *rest])
        if self.begun:
            summary = error_summary(start.status, body)
            raise ReplicaLostError(f"a replica would not go on with a stream: {summary}")
        await send_whole(self._send, AnswerStart(start.status, start.headers, body))

    async def _pass_on(self, body: bytes, journal: Journal, num_tokens: int) -> None:
        # What the client has must never be more than the journal tells.
        if journal:
            self._journal.add(journal)
        if num_tokens:
            self._watch.progress(num_tokens)
        events = self._stream.forward(body)
        if events.endswith(DONE_EVENT):
            self._last, events = events, b""
        await send_piece(self._send, events)


class Unwatched:
    """A watch that nobody keeps."""

    def progress(self, num_tokens: int) -> None:
        """Nothing to do."""

    def retried(self, *, continued: bool) -> None:
        """Nothing to do."""

    def ended(self, end: AnswerEnd | None) -> None:
        """Nothing to do."""


async def whole_answer(replicas: ReplicaCalls, request: RelayedRequest) -> AnswerStart:
    """A replica's answer, or what a client is told where there is none."""
    try:
        return (await replicas.whole(request))[0]
    except Exception as error:  # noqa: BLE001  # the boundary: logged, and answered
        answer = _answer_for_failure(error, request)
        return AnswerStart(answer.status, answer.headers, answer.body)


async def relay_answer(
    replicas: ReplicaCalls,
    request: RelayedRequest,
    streaming: bool,
    send: Send,
    watch: Watch | None = None,
    retries: Retries | None = None,
) -> None:
    """Call a replica and pass on what it answers, or why there is no answer."""
    watch = watch or Unwatched()
    retries = retries or Retries()
    request = replace(request, replica_wait_s=retries.config.replica_wait_s)
    end: AnswerEnd | None = None
    stream = StreamRelay(request, send, watch, retries) if streaming else None
    try:
        if stream is None:
            answer, end = await _whole(replicas, request, watch, retries)
            await send_whole(send, answer)
        else:
            await stream.run(replicas)
    except Exception as error:  # noqa: BLE001  # the boundary: logged, and answered
        failure = _answer_for_failure(error, request)
        if stream is not None and stream.begun:
            await stream.end_with(failure)
        else:
            await send_error(send, failure)
    finally:
        watch.ended(end if stream is None else stream.end)


class _Told:
    """Tells of the tokens of a request, each once, over all of its attempts."""

    def __init__(self, tell: Progress) -> None:
        self._tell = tell
        self._num_told = 0
        self._num_generated = 0

    def begin(self) -> None:
        """Begin an attempt, which generates the tokens from the first one."""
        self._num_generated = 0

    def progress(self, num_tokens: int) -> None:
        """Note that the attempt has generated so many more."""
        self.up_to(self._num_generated + num_tokens)

    def up_to(self, num_tokens: int) -> None:
        """Note that the attempt has generated so many in all."""
        self._num_generated = num_tokens
        if num_tokens > self._num_told:
            self._tell(num_tokens - self._num_told)
            self._num_told = num_tokens


async def _whole(
    replicas: ReplicaCalls, request: RelayedRequest, watch: Watch, retries: Retries
) -> tuple[AnswerStart, AnswerEnd]:
    attempts = retries.attempts()
    told = _Told(watch.progress)
    while True:
        told.begin()
        try:
            answer, end = await replicas.whole(request, told.progress)
            told.up_to(end.generated_tokens)
            return answer, end
        except ReplicaLostError as error:
            await attempts.another(error, continued=False)
            watch.retried(continued=False)


def _answer_for_failure(error: Exception, request: RelayedRequest) -> ErrorAnswer:
    """What a client is told when its request failed behind the gateway."""
    if isinstance(error, BodyTooLargeError):
        return body_too_large(str(error))
    facts = {"path": request.path, "request_id": request.terms.request_id}
    if isinstance(error, ReplicaLostError):
        logger.warning("replica lost under a request", extra=facts | {"reason": str(error)})
        if isinstance(error, EnginesDiedError):
            return engine_lost_twice()
        return replica_unavailable() if isinstance(error, NoReplicaError) else engine_lost()
    logger.error("request failed", extra=facts, exc_info=error)
    return internal_error()
