"""Brings a replica's answer to the client: whole or piece by piece, and always to an end.

A stream that breaks off behind us ends with an error event and `[DONE]`, never with a cut
connection or a hang.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from apar_core.errors import EngineError
from deployments.answer_parts import AnswerEnd, AnswerStart, Headers, Piece
from deployments.asgi_relay import RelayedRequest, Send
from deployments.error_responses import (
    DONE_EVENT,
    ErrorAnswer,
    engine_lost,
    internal_error,
    normalised,
)

logger = logging.getLogger(__name__)

# The server before us sets these for its own connection.
_HOP_HEADERS = (b"content-length", b"connection", b"transfer-encoding", b"date", b"server")


class ReplicaCalls(Protocol):
    """The calls that a gateway makes, over a Ray Serve handle or directly.

    Both raise ReplicaLostError where no replica answers, or the one that did is gone.
    """

    def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[AnswerStart | Piece | AnswerEnd, None]:
        """The answer piece by piece; closing the iterator cancels the request."""

    async def whole(self, request: RelayedRequest) -> tuple[AnswerStart, AnswerEnd]:
        """The answer in one piece, and its cost; cancelling the call cancels the request."""


class Watch(Protocol):
    """Who wants to know how an answer gets on."""

    def progress(self, num_tokens: int) -> None:
        """The request has generated so many more tokens, of all its threads together.

        A whole answer tells of all of them at its end. What is generated twice, after the loss of
        a replica, counts twice.
        """

    def retried(self, *, continued: bool) -> None:
        """A replica was lost and the request went to another, from the start or continued."""

    def ended(self, end: AnswerEnd | None) -> None:
        """Called once, at the last: the cost, or None where nobody knows it."""


class Unwatched:
    """A watch that nobody keeps."""

    def progress(self, num_tokens: int) -> None:
        """Nothing to do."""

    def retried(self, *, continued: bool) -> None:
        """Nothing to do."""

    def ended(self, end: AnswerEnd | None) -> None:
        """Nothing to do."""


class ReplicaLostError(EngineError):
    """The replica died, or cannot be reached, while it held a request."""


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
) -> None:
    """Call a replica and pass on what it answers, or why there is no answer."""
    watch = watch or Unwatched()
    end: AnswerEnd | None = None
    try:
        if streaming:
            end = await _relay_stream(replicas, request, send, watch)
        else:
            answer, end = await replicas.whole(request)
            watch.progress(end.generated_tokens)
            await send_whole(send, answer)
    except Exception as error:  # noqa: BLE001  # the boundary: logged, and answered
        await send_error(send, _answer_for_failure(error, request))
    finally:
        watch.ended(end)


async def _relay_stream(
    replicas: ReplicaCalls, request: RelayedRequest, send: Send, watch: Watch
) -> AnswerEnd | None:
    """Relay the parts as they come; raises only before the first one."""
    end: AnswerEnd | None = None
    async with aclosing(replicas.stream(request)) as parts:
        start = await anext(parts)
        if not isinstance(start, AnswerStart):
            raise TypeError("a replica's answer must begin with its start")
        if start.status >= 400:
            rest = [part.body async for part in parts if isinstance(part, Piece)]
            body = b"".join([start.body, *rest])
            await send_whole(send, AnswerStart(start.status, start.headers, body))
            return None
        watch.progress(start.num_tokens)
        await _send_start(send, start.status, start.headers)
        await _send_piece(send, start.body)
        tail = start.body[-len(DONE_EVENT) :]
        try:
            async for part in parts:
                if isinstance(part, Piece):
                    watch.progress(part.num_tokens)
                    tail = (tail + part.body)[-len(DONE_EVENT) :]
                    await _send_piece(send, part.body)
                elif isinstance(part, AnswerEnd):
                    end = part
        except Exception as error:  # noqa: BLE001  # the boundary: logged, and answered
            answer = _answer_for_failure(error, request)
            if tail != DONE_EVENT:
                # The last event may have been cut in half; a line break ends it.
                await _send_piece(send, b"\n\n" * (tail[-2:] != b"\n\n") + answer.events)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    return end


def _answer_for_failure(error: Exception, request: RelayedRequest) -> ErrorAnswer:
    """What a client is told when its request failed behind the gateway."""
    if isinstance(error, ReplicaLostError):
        logger.warning("replica lost under a request", extra={"path": request.path})
        return engine_lost()
    logger.error("request failed", extra={"path": request.path}, exc_info=error)
    return internal_error()


async def _send_start(send: Send, status: int, headers: Headers) -> None:
    kept = [item for item in headers if item[0].lower() not in _HOP_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": kept})


async def _send_piece(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


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
