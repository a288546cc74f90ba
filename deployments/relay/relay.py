"""Relay of a replica's answer to the client: whole or piece by piece, and always to an end.

If a replica is lost before the client has received anything, the request is sent to another one
from the start. A stream that has begun continues on another replica. If neither is possible, the
client gets an error (in a stream: the error events of its grammar), never a cut connection or a
hang.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from starlette.types import Send

from apar_core.errors import CapacityError
from apar_core.journal import JournalBook
from deployments.config.retries import (
    FIRST_PAUSE_S,
    MAX_DEATHS,
    RetryConfig,
    pause_before_retry_s,
)
from deployments.relay.continuation import client_stream
from deployments.wire.errors import (
    INTERNAL_ERROR,
    BodyTooLargeError,
    DeadlineError,
    EnginesDiedError,
    ErrorResponse,
    NoReplicaError,
    ReplicaLostError,
    error_summary,
    normalised,
    normalised_events,
    response_for,
)
from deployments.wire.request import Deadlines, RelayedRequest
from deployments.wire.response import Headers, Piece, ResponseEnd, ResponseStart
from deployments.wire.routes import ResponseForm, form_of
from deployments.wire.start import StartReport

logger = logging.getLogger(__name__)

# A server in front of the gateway sets these for its own connection.
_HOP_HEADERS = (b"content-length", b"connection", b"transfer-encoding", b"date", b"server")
# A replica ends an answer at its deadline; its last piece may take this much longer to arrive.
_DEADLINE_GRACE_S = 2.0

ResponseStream = AsyncGenerator[ResponseStart | Piece | ResponseEnd, None]
Progress = Callable[[int, int], None]
"""Called with the tokens that a request has generated since the last call, and with the tokens of
its prompts that the engine has so far.
"""


class ReplicaCalls(Protocol):
    """Calls to the replicas of one model.

    `stream` and `whole` raise ReplicaLostError if no replica answers, or the one that did is gone.
    """

    @property
    def num_running(self) -> int:
        """Number of running replicas known to this process; if there is none, a call starts one."""

    def stream(self, request: RelayedRequest) -> ResponseStream:
        """Yield the answer piece by piece; closing the iterator cancels the request."""

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[ResponseStart, ResponseEnd]:
        """Return the whole answer and its cost; cancelling the call cancels the request.

        `progress` is called now and then; only the cost counts all tokens.
        """


class ModelReplicas(ReplicaCalls, Protocol):
    """The replicas of one model, and their state."""

    @property
    def num_unreachable(self) -> int:
        """Replicas to which this process has no connections of its own, because they failed."""

    async def answering(self, wait_s: float) -> int:
        """Ask the engines of all running replicas for a sign of life; return how many gave one.

        Unlike a request, this does not wait for a slot at a replica.
        """

    async def starting(self) -> Sequence[StartReport]:
        """Return the reports of the replicas that are starting."""


class ResponseObserver(Protocol):
    """Receives the progress, retries and cost of one answer."""

    def progress(self, num_tokens: int, prompt_tokens: int) -> None:
        """Count tokens that all threads of the request have generated since the last call.

        A stream reports with each piece, a whole answer now and then and at its end. Tokens that
        are generated again after the loss of a replica count once. `prompt_tokens` are those of all
        prompts that the engine has so far; 0 while it has none.
        """

    def retried(self, *, continued: bool) -> None:
        """Note the loss of a replica, and whether the stream continues or starts again."""

    def ended(self, end: ResponseEnd | None) -> None:
        """Take the cost of the answer, None if unknown; the last call, made exactly once."""


class Retries:
    """Decides whether and when a request is retried after the loss of its replica."""

    def __init__(
        self, config: RetryConfig | None = None, *, first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        self.config = config or RetryConfig()
        self.first_pause_s = first_pause_s

    def attempts(self) -> "Attempts":
        """Start counting the attempts of one request."""
        return Attempts(self)


class Attempts:
    """The replicas that one request has lost, and the engines that have died under it."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._num_lost = 0
        # A set, because a replica accepts requests for a moment after its engine has died.
        self._dead: set[str | int] = set()

    async def another(self, error: ReplicaLostError) -> None:
        """Pause before the next attempt. Raises the error if there must be no further one."""
        self._num_lost += 1
        if error.engine_died:
            self._dead.add(error.replica or self._num_lost)
        if len(self._dead) >= MAX_DEATHS:
            raise EnginesDiedError(f"{len(self._dead)} engines died, the last: {error}")
        if self._num_lost > self._retries.config.max_retries or isinstance(error, NoReplicaError):
            raise error
        await asyncio.sleep(pause_before_retry_s(self._num_lost, self._retries.first_pause_s))


async def relay_response(
    replicas: ReplicaCalls,
    request: RelayedRequest,
    send: Send,
    observer: ResponseObserver,
    retries: Retries,
    wait_s: float | None = None,
    hold: Callable[[int], None] | None = None,
    certain: Callable[[int], None] | None = None,
) -> None:
    """Call a replica and send its answer to the client, or an error if there is none.

    A replica must accept the request within `wait_s`, by default `retries.replica_wait_s`. `hold`
    is called with the bytes of a whole answer, which is kept until the client has read it; it may
    raise CapacityError. `certain` is called before each piece of a stream is sent, with the number
    of text tokens that the client has then (`Piece.certain_tokens`).
    """
    deadlines = request.terms.deadlines
    wait_s = wait_s or retries.config.replica_wait_s
    if deadlines is not None:
        wait_s = min(wait_s, max(0.0, deadlines.first[1] - time.time()) + _DEADLINE_GRACE_S)
    request = replace(request, replica_wait_s=wait_s)
    end: ResponseEnd | None = None
    stream = None
    if request.streams:
        stream = _StreamRelay(request, send, observer, retries, certain)
    try:
        async with asyncio.timeout(_time_left_s(deadlines)):
            if stream is None:
                answer, end = await _whole(replicas, request, observer, retries)
            else:
                await stream.run(replicas)
        if stream is None:
            await _send_held(send, answer, form_of(request.path), hold)
    except Exception as error:  # noqa: BLE001  # boundary: the error is logged and answered
        failure = _logged_answer(error, request).in_form(form_of(request.path))
        if stream is not None and stream.begun:
            await stream.end_with(failure)
        else:
            await send_error(send, failure)
    finally:
        observer.ended(end if stream is None else stream.end)


async def _send_held(
    send: Send, answer: ResponseStart, form: ResponseForm, hold: Callable[[int], None] | None
) -> None:
    """Send a whole answer, or a refusal if there is no room to keep it meanwhile."""
    try:
        if hold is not None:
            hold(len(answer.body))
    except CapacityError as error:
        await send_error(send, response_for(error).in_form(form))
        return
    await send_whole(send, answer, form)


async def whole_response(replicas: ReplicaCalls, request: RelayedRequest) -> ResponseStart:
    """Return a replica's answer, or the error that a client gets instead."""
    try:
        return (await replicas.whole(request))[0]
    except Exception as error:  # noqa: BLE001  # boundary: the error is logged and answered
        answer = _logged_answer(error, request)
        return ResponseStart(answer.status, answer.headers, answer.body)


def _time_left_s(deadlines: Deadlines | None) -> float | None:
    """Return the seconds in which the answer must be complete; None without a deadline.

    A replica ends its answer in time. This is for one that does not, or is unreachable.
    """
    if deadlines is None or deadlines.answer_at_s is None:
        return None
    return max(0.0, deadlines.answer_at_s - time.time()) + _DEADLINE_GRACE_S


def _logged_answer(error: Exception, request: RelayedRequest) -> ErrorResponse:
    facts = {"path": request.path, "request_id": request.terms.request_id}
    deadlines = request.terms.deadlines
    if (
        deadlines is not None
        and deadlines.first[1] <= time.time()
        and isinstance(error, TimeoutError | NoReplicaError)
    ):
        reason = "no replica finished it in time"
        if isinstance(error, NoReplicaError):
            reason = "no replica accepted it in time"
        logger.warning("deadline missed", extra=facts | {"reason": reason})
        return response_for(DeadlineError(deadlines.first[0], reason))
    if isinstance(error, BodyTooLargeError):
        return response_for(error)
    if isinstance(error, ReplicaLostError):
        logger.warning("replica lost under a request", extra=facts | {"reason": str(error)})
        return response_for(error)
    # Of any class: Ray raises a replica's exception as a subclass whose message is the traceback.
    logger.error("request failed", extra=facts, exc_info=error)
    return INTERNAL_ERROR


async def _whole(
    replicas: ReplicaCalls, request: RelayedRequest, observer: ResponseObserver, retries: Retries
) -> tuple[ResponseStart, ResponseEnd]:
    attempts = retries.attempts()
    num_reported = num_generated = 0

    def progress(num_tokens: int, prompt_tokens: int) -> None:
        """Report tokens that no earlier attempt has reported."""
        nonlocal num_reported, num_generated
        num_generated += num_tokens
        num_new = max(0, num_generated - num_reported)
        num_reported += num_new
        observer.progress(num_new, prompt_tokens)

    while True:
        num_generated = 0
        try:
            answer, end = await replicas.whole(request, progress)
            progress(end.generated_tokens - num_generated, end.prompt_tokens)
            return answer, end
        except ReplicaLostError as error:
            await attempts.another(error)
            observer.retried(continued=False)


class _StreamRelay:
    """One streamed request, on one replica after another if necessary."""

    def __init__(
        self,
        request: RelayedRequest,
        send: Send,
        observer: ResponseObserver,
        retries: Retries,
        certain: Callable[[int], None] | None,
    ) -> None:
        terms = replace(request.terms, keeps_journal=retries.config.continue_streams)
        self._request = replace(request, terms=terms)
        self._send = send
        self._observer = observer
        self._certain = certain
        self._attempts = retries.attempts()
        self._stream = client_stream(form_of(request.path))
        self._journal = JournalBook()
        self._continuable = False
        # The final event, held back until the cost is known: a client may leave once it has it.
        self._last = b""
        self.begun = False
        """Whether the client has received the start of its answer."""
        self.end: ResponseEnd | None = None
        """The cost of the answer, once known."""

    async def run(self, replicas: ReplicaCalls) -> None:
        """Relay the answer to its end.

        Raises an error that cannot be retried. If `begun`, the caller must then call `end_with`.
        """
        while True:
            try:
                async with aclosing(replicas.stream(self._request)) as parts:
                    return await self._relay(parts)
            except ReplicaLostError as error:
                if self.begun and self._stream.complete:
                    return await self._finish()
                if self.begun and not (self._continuable and self._request.continuable):
                    raise
                await self._attempts.another(error)
                self._observer.retried(continued=self.begun)
                if self.begun:
                    terms = replace(self._request.terms, resume=self._journal.journal())
                    self._request = replace(self._request, terms=terms)
                    self._stream.begin_again()

    async def end_with(self, error: ErrorResponse) -> None:
        """End a stream that has begun with an error event, unless it is complete."""
        if not self._stream.complete:
            self._last = self._stream.failure(error)
        await self._finish()

    async def _relay(self, parts: ResponseStream) -> None:
        start = await anext(parts)
        if not isinstance(start, ResponseStart):
            raise TypeError("a replica's answer must begin with its start")
        if start.status >= 400:
            await self._relay_error(start, parts)
            return
        self._continuable = start.continuable
        if not self.begun:
            headers = _end_to_end(start.headers)
            await self._send(
                {"type": "http.response.start", "status": start.status, "headers": headers}
            )
            self.begun = True
        await self._forward(start)
        async for part in parts:
            if isinstance(part, Piece):
                await self._forward(part)
            elif isinstance(part, ResponseEnd):
                self.end = part
            else:
                raise TypeError(f"a {type(part).__name__} is not part of an answer")
        self._last += self._stream.flush()
        if not self._stream.may_end:
            # vLLM ends a stream of named events like this if one of its coroutines raises.
            self._last += self._stream.failure(INTERNAL_ERROR.in_form(form_of(self._request.path)))
        await self._finish()

    async def _relay_error(self, start: ResponseStart, parts: ResponseStream) -> None:
        rest = [part.body async for part in parts if isinstance(part, Piece)]
        body = b"".join([start.body, *rest])
        if self.begun:
            summary = error_summary(start.status, body)
            raise ReplicaLostError(f"a replica refused to continue a stream: {summary}")
        form = form_of(self._request.path)
        await send_whole(self._send, ResponseStart(start.status, start.headers, body), form)

    async def _forward(self, part: ResponseStart | Piece) -> None:
        # Before sending: the client must never have more text than the journal covers.
        if part.journal:
            self._journal.add(part.journal)
        self._observer.progress(part.num_tokens, part.prompt_tokens)
        if self._certain is not None:
            self._certain(part.certain_tokens)
        events = normalised_events(self._stream.forward(part.body), form_of(self._request.path))
        if self._stream.ends_with(events):
            self._last, events = events, b""
        await self._send_piece(events)

    async def _finish(self) -> None:
        await self._send_piece(self._last)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_piece(self, body: bytes) -> None:
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def send_whole(
    send: Send, answer: ResponseStart, form: ResponseForm = ResponseForm.CHUNKS
) -> None:
    """Send an answer in one piece, an error in the given form."""
    body = normalised(answer.status, answer.body, form) if answer.status >= 400 else answer.body
    await send_as_is(send, ResponseStart(answer.status, _end_to_end(answer.headers), body))


async def send_as_is(send: Send, answer: ResponseStart) -> None:
    """Send a response in one piece, with its length; also errors with further keys in the body."""
    length = (b"content-length", str(len(answer.body)).encode())
    await _send(send, answer.status, [*answer.headers, length], answer.body)


async def send_error(send: Send, answer: ErrorResponse) -> None:
    """Send an error of the gateway."""
    await _send(send, answer.status, answer.headers, answer.body)


async def _send(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _end_to_end(headers: Headers) -> Headers:
    return [item for item in headers if item[0].lower() not in _HOP_HEADERS]
