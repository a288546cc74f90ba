"""How a replica answers: through vLLM's application, up to where its engine is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import ASGIApp, Message

from apar_core.engine.journal import RequestFollower
from apar_core.errors import EngineError
from apar_core.fork_parameters import KeyTerms
from deployments.replica.replica_metrics import ReplicaMetrics
from deployments.tracing import Tracing, engine_trace
from deployments.wire.answer import (
    AnswerBroken,
    AnswerEnd,
    AnswerPart,
    AnswerStart,
    Headers,
    Piece,
    WholeAnswer,
)
from deployments.wire.request import RelayedRequest, RequestTerms

if TYPE_CHECKING:
    from deployments.replica.engine_trace import EngineTrace


class FollowingEngine(Protocol):
    """The part of an engine that tells of its requests."""

    def follow(
        self, request_id: str, follower: RequestFollower, terms: KeyTerms | None = None
    ) -> None:
        """Tell a follower of a request, which runs on the terms of its key."""

    def unfollow(self, request_id: str) -> None:
        """Tell it no more."""


class FollowedRequest:
    """Follows a request in the engine, and writes what it learns on the parts of the answer."""

    def __init__(
        self, engine: FollowingEngine, terms: RequestTerms, trace: EngineTrace | None = None
    ) -> None:
        self.terms = terms
        self._engine = engine
        self._trace = trace
        self._follower = RequestFollower(
            keeps_journal=terms.keeps_journal, resume=terms.resume, observer=trace
        )
        self._engine_request_id: str | None = None
        self._came_s = time.monotonic()

    @property
    def follower(self) -> RequestFollower:
        """What is known of the request in the engine."""
        return self._follower

    @property
    def aborted(self) -> bool:
        """Whether the engine core has given the request up, as it does before it exits."""
        return self._follower.aborted

    def begin(self, engine_request_id: str) -> None:
        """Follow the request that the engine is about to get under this id."""
        self._engine_request_id = engine_request_id
        self._engine.follow(engine_request_id, self._follower, self.terms.key_terms())

    def close(self, *, broken: bool = False) -> None:
        """Follow it no more; `broken` says that it did not end here."""
        if self._engine_request_id is not None:
            self._engine.unfollow(self._engine_request_id)
        if self._trace is not None:
            self._trace.end(self.end(), broken=broken)

    def start(self, start: AnswerStart) -> AnswerStart:
        """The start of a streamed answer, with its share of tokens and journal."""
        follower = self._follower
        return AnswerStart(
            start.status,
            start.headers,
            start.body,
            follower.take_journal(),
            follower.take_num_tokens(),
            continuable=follower.continuable,
        )

    def piece(self, body: bytes) -> Piece:
        """A piece of the answer, with its share of tokens and journal."""
        return Piece(body, self._follower.take_journal(), self._follower.take_num_tokens())

    def take_num_tokens(self) -> int:
        """Tokens generated since the last part or call."""
        return self._follower.take_num_tokens()

    def end(self) -> AnswerEnd:
        """What the answer has cost; an ordinary checkpoint's answer has one thread a choice.

        A beam search counts as one thread, of unknown length, with the tokens of all its beams.
        """
        follower, trees = self._follower, self._follower.statistics
        if trees is None:
            num_roots = follower.num_roots
            alone = num_roots == 1 and not follower.searches_beams
            longest = follower.generated_tokens if alone else 0
            return AnswerEnd(
                follower.prompt_tokens, follower.generated_tokens, num_roots, 0, longest
            )
        return AnswerEnd(
            follower.prompt_tokens,
            follower.generated_tokens,
            trees.threads,
            trees.forks,
            trees.decode_steps,
        )

    def signed_end(self, replica: str) -> AnswerEnd:
        """The cost, with the replica's id and the time that the request has been there."""
        follower = self._follower
        return replace(
            self.end(),
            replica=replica,
            replica_s=round(time.monotonic() - self._came_s, 6),
            engine_s=round(max(follower.last_output_s - follower.began_s, 0.0), 6),
        )


logger = logging.getLogger(__name__)


SERVED_KEY = "apar"
"""Key of the ASGI scope under which the layers of a replica find the `ServedRequest`."""


class ServedRequest(Protocol):
    """One request inside a replica, as its layers share it."""

    @property
    def terms(self) -> RequestTerms:
        """What the gateway has decided about it."""

    def begin(self, engine_request_id: str) -> None:
        """Told the id under which the engine is about to get the request."""


# After a disconnect the application cleans up by itself; this is for one that hangs.
DISCONNECT_GRACE_S = 10.0


class _Exchange:
    """One request inside the application; owns the task that runs it."""

    def __init__(self, request: RelayedRequest, served: ServedRequest | None) -> None:
        self._request = request
        self._served = served
        self._body_sent = False
        self._gone = asyncio.Event()
        self._wake = asyncio.Event()
        self._pieces: list[bytes] = []
        self.status: int | None = None
        self.headers: Headers = []
        self.complete = False
        self._task: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        """Run the application on this request."""
        self._task = asyncio.create_task(self._run(app))

    async def _run(self, app: ASGIApp) -> None:
        try:
            scope = {**self._request.scope(), SERVED_KEY: self._served}
            await app(scope, self._receive, self._send)
        finally:
            self.complete = True
            self._wake.set()

    async def _receive(self) -> Message:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = list(message["headers"])
            return
        if body := message.get("body", b""):
            self._pieces.append(body)
        if not message.get("more_body", False):
            self.complete = True
        self._wake.set()

    async def next_piece(self) -> bytes:
        """All that the application has sent since last time; waits while that is nothing.

        Empty once the answer is complete.
        """
        while not self._pieces and not self.complete:
            self._wake.clear()
            await self._wake.wait()
        piece = b"".join(self._pieces)
        self._pieces.clear()
        return piece

    async def close(self) -> None:
        """Tell the application that the client has gone, and wait until it has cleaned up.

        A cancelled task would leave vLLM's own handler task running; a disconnect does not.
        """
        self._gone.set()
        if self._task is None:
            return
        done, _ = await asyncio.wait([self._task], timeout=DISCONNECT_GRACE_S)
        if not done:
            logger.warning("application ignored a disconnect", extra={"path": self._request.path})
            self._task.cancel()
        elif not self._task.cancelled() and (error := self._task.exception()) is not None:
            if self.status is None:
                raise error
            # Starlette answers 500 and raises all the same; the client has its answer.
            logger.error("error in the application", exc_info=error)


async def relay(
    app: ASGIApp, request: RelayedRequest, served: ServedRequest | None = None
) -> AsyncGenerator[AnswerStart | bytes, None]:
    """The application's answer: its start with the first piece, then the rest as it comes.

    Closing the iterator, or cancelling it, is the client's disconnect.
    """
    exchange = _Exchange(request, served)
    exchange.start(app)
    try:
        first = await exchange.next_piece()
        if exchange.status is None:
            await exchange.close()
            raise RuntimeError("the application ended without an answer")
        yield AnswerStart(exchange.status, exchange.headers, first)
        while piece := await exchange.next_piece():
            yield piece
    finally:
        await exchange.close()


# A step on a CPU may take seconds, but not this long; under Ray Serve's own limit of 30 s.
ENGINE_ANSWER_S = 25.0
# Ray Serve itself would look three times, and then give the requests inside time to end.
_MAX_UNANSWERED = 2
# How often a whole answer tells what it has generated so far.
PROGRESS_S = 0.5


class AnsweringEngine(FollowingEngine, Protocol):
    """The part of an engine that answers depend on."""

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""

    async def core_state(self) -> dict[str, Any]:
        """What the engine core says of itself, between two steps."""


class Answering:
    """The calls of a replica that answer a client's request."""

    def __init__(self, engine: AnsweringEngine, app: ASGIApp, replica_id: str) -> None:
        self._engine = engine
        self._app = app
        self._replica_id = replica_id
        self._engine_ends = False
        self._num_unanswered = 0
        # As Ray Serve counts requests against its cap: each once, however many choices.
        self.num_inside = 0
        self.metrics: ReplicaMetrics | None = None
        self.tracing: Tracing | None = None

    @property
    def engine_lost(self) -> bool:
        """Whether the engine is dead, hangs, or has given requests up as it does when told to exit.

        It may take seconds to exit, and only then counts as dead.
        """
        return self._engine_ends or self._engine.errored

    async def check_health(self) -> None:
        """Ray Serve's health check; raises EngineError when the engine is dead or does not answer.

        One that hangs never dies: its requests are handed on once it has not answered twice.
        """
        if self.engine_lost:
            raise EngineError("the engine process has died")
        try:
            await asyncio.wait_for(self._engine.core_state(), ENGINE_ANSWER_S)
        except TimeoutError as error:
            self._num_unanswered += 1
            self._engine_ends |= self._num_unanswered >= _MAX_UNANSWERED
            raise EngineError(f"the engine did not answer within {ENGINE_ANSWER_S} s") from error
        self._num_unanswered = 0

    async def stream(self, request: RelayedRequest) -> AsyncIterator[AnswerPart]:
        """The answer, piece by piece."""
        served = self._followed(request)
        begun = False
        async with aclosing(self._answer(request, served)) as parts:
            async for part in parts:
                begun = True
                if isinstance(part, AnswerStart):
                    yield served.start(part)
                else:
                    yield served.piece(part).to_wire()
        broken = self._broken(served)
        if broken is not None and begun:
            # What has been generated since the last piece need not be generated again.
            yield served.piece(b"").to_wire()
        yield broken or served.signed_end(self._replica_id)

    async def whole(self, request: RelayedRequest) -> AsyncIterator[WholeAnswer]:
        """The answer in one piece, and what it has cost; before, now and then, the new tokens."""
        served = self._followed(request)
        answer = asyncio.create_task(self._joined(request, served))
        try:
            while not (await asyncio.wait([answer], timeout=PROGRESS_S))[0]:
                if num_tokens := served.take_num_tokens():
                    yield num_tokens
            start = answer.result()
        finally:
            # Of use where the client has gone: the application is told, and cleans up.
            answer.cancel()
            await asyncio.wait([answer])
        broken = self._broken(served)
        if broken is not None and (num_tokens := served.take_num_tokens()):
            yield num_tokens
        yield broken or (start, served.signed_end(self._replica_id))

    def _followed(self, request: RelayedRequest) -> FollowedRequest:
        terms = request.terms
        trace = engine_trace(self.tracing, terms.trace_headers, self._replica_id)
        return FollowedRequest(self._engine, terms, trace)

    async def _joined(self, request: RelayedRequest, served: FollowedRequest) -> AnswerStart:
        start = AnswerStart(500, [], b"")
        pieces: list[bytes] = []
        async with aclosing(self._answer(request, served)) as parts:
            async for part in parts:
                if isinstance(part, AnswerStart):
                    start = part
                    pieces.append(part.body)
                else:
                    pieces.append(part)
        return AnswerStart(start.status, start.headers, b"".join(pieces))

    async def _answer(
        self, request: RelayedRequest, served: FollowedRequest
    ) -> AsyncGenerator[AnswerStart | bytes, None]:
        """What the application answers, up to where the engine dies or gives the request up.

        After that, vLLM answers with errors, in whatever form, or with the text so far as if it
        were whole, though nothing is wrong with the request.
        """
        self.num_inside += 1
        try:
            if self.engine_lost:
                # The watchdog is about to end this process, and Ray Serve then knows that it is
                # gone. A replica that refused at once would look idle, and draw every retry.
                await asyncio.sleep(ENGINE_ANSWER_S)
            async with aclosing(relay(self._app, request, served)) as parts:
                async for part in parts:
                    if self._broken(served):
                        return
                    yield part
        except Exception:
            if not self._broken(served):
                raise
        finally:
            self._engine_ends |= served.aborted
            served.close(broken=self._broken(served) is not None)
            self.num_inside -= 1
            if self.metrics is not None and not self._broken(served):
                self.metrics.finished(served.follower)

    def _broken(self, served: FollowedRequest) -> AnswerBroken | None:
        """Why the replica cannot go on with an answer; None while it can."""
        # Check aborts first: an engine that shuts down aborts its requests, then counts as dead.
        if served.aborted:
            return AnswerBroken("the engine has given the request up")
        if self._engine.errored:
            return AnswerBroken("the engine has died", engine_died=True)
        return None
