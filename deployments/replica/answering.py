"""How a replica answers: through vLLM's application, up to where its engine is lost."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

from starlette.types import ASGIApp

from apar_core.errors import EngineError
from deployments.metrics.replica_metrics import ReplicaMetrics
from deployments.replica.asgi import relay
from deployments.replica.followed_request import FollowedRequest, FollowingEngine
from deployments.tracing import Tracing, engine_trace
from deployments.wire.answer import AnswerBroken, AnswerPart, AnswerStart, WholeAnswer
from deployments.wire.request import RelayedRequest

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
