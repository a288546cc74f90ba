"""Brings a replica's answer to the client: whole or piece by piece, and always to an end.

A request whose replica is lost before the client has got anything is sent again, unseen; a stream
that has begun goes on at another replica. What can be neither ends with an error, a stream with an
error event and `[DONE]`, never with a cut connection or a hang.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Protocol

from deployments.answer_parts import AnswerEnd, AnswerStart, Piece
from deployments.answer_sending import send_error, send_whole
from deployments.asgi_relay import RelayedRequest, Send
from deployments.error_responses import (
    ErrorAnswer,
    body_too_large,
    engine_lost,
    engine_lost_twice,
    internal_error,
    replica_unavailable,
)
from deployments.request_body import BodyTooLargeError
from deployments.retries import EnginesDiedError, NoReplicaError, ReplicaLostError, Retries
from deployments.stream_relay import StreamRelay

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
