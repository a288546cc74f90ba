"""Answer requests through vLLM's application in process, until the engine is lost.

`call_application` runs the ASGI application on one request. `FollowedRequest` watches the request
in the engine and adds tokens, journal and cost to the parts of its answer. `Answering` joins the
two and breaks answers off when the engine dies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from starlette.types import ASGIApp, Message

from apar_core.engine.request_follower import RequestFollower
from apar_core.errors import EngineError
from apar_core.fork_parameters import KeyTerms
from deployments.replica.engine_trace import EngineTrace, start_engine_trace
from deployments.tracing.tracing import Tracing
from deployments.wire.errors import DeadlineError, response_for
from deployments.wire.request import SCOPE_KEY, RelayedRequest, RequestTerms
from deployments.wire.response import (
    Headers,
    Piece,
    ResponseBroken,
    ResponseEnd,
    ResponsePart,
    ResponseStart,
    WholeResponse,
)

if TYPE_CHECKING:
    from apar_core.scheduler.core_state import CoreState
    from deployments.replica.replica_metrics import ReplicaMetrics

logger = logging.getLogger(__name__)

# After a disconnect the application cleans up by itself; this bounds the wait if it hangs.
DISCONNECT_GRACE_S = 10.0
# Longest wait for the engine. A step on a CPU may take seconds; Ray Serve's own limit is 30 s.
ENGINE_ANSWER_S = 25.0
# Ray Serve would only give up after three failed health checks, and then wait for the requests.
_MAX_UNANSWERED = 2
# Period at which a request whose deadline has passed is ended again, until its answer has ended.
_END_AGAIN_S = 0.05
# Shortest period of token counts of a whole answer. A client that leaves pays up to the last one.
PROGRESS_S = 0.25
# Periods grow with the time since the start, so that few counts are sent of a long answer.
_PROGRESS_SHARE = 0.25


class AnsweringEngine(Protocol):
    """The part of `AparAsyncLLM` that answers depend on."""

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""

    async def core_state(self) -> CoreState:
        """Return the engine core's state, between two steps."""

    def follow(
        self, request_id: str, follower: RequestFollower, terms: KeyTerms | None = None
    ) -> None:
        """Pass a request's outputs to `follower`, and its key's terms to the engine."""

    def unfollow(self, request_id: str) -> None:
        """Stop following a request."""

    def end(self, request_id: str) -> bool:
        """End a request with what it has generated; returns whether the engine has it."""


class FollowedRequest:
    """One request inside a replica: its terms, and what the engine generates for it."""

    def __init__(
        self, engine: AnsweringEngine, terms: RequestTerms, trace: EngineTrace | None = None
    ) -> None:
        self.terms = terms
        self.follower = RequestFollower(
            keeps_journal=terms.keeps_journal, resume=terms.resume, observer=trace
        )
        self._engine = engine
        self._trace = trace
        self._engine_request_id: str | None = None
        self._arrived_s = time.monotonic()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.missed: str | None = None
        """The deadline that passed before the first token; None if there is none."""

    def begin(self, engine_request_id: str) -> None:
        """Follow the request that the engine is about to receive under this id."""
        self._engine_request_id = engine_request_id
        self._engine.follow(engine_request_id, self.follower, self.terms.key_terms())
        deadlines = self.terms.deadlines
        if deadlines is None:
            return
        if deadlines.answer_at_s is not None:
            self._end_at("deadline_ms", deadlines.answer_at_s)
        # A stream that is continued has its first token.
        if deadlines.first_token_at_s is not None and self.terms.resume is None:
            self._end_at("first_token_deadline_ms", deadlines.first_token_at_s)

    def _end_at(self, option: str, at_s: float) -> None:
        delay_s = max(0.0, at_s - time.time())
        self._timers[option] = asyncio.get_running_loop().call_later(delay_s, self._end, option)

    def _end(self, option: str) -> None:
        """End the request, because a deadline has passed."""
        has_begun = self.follower.first_output_s > 0 or self.terms.resume is not None
        if option == "first_token_deadline_ms" and has_begun and self.missed is None:
            return
        if not has_begun:
            self.missed = self.missed or option
        if self._engine_request_id is not None:
            self._engine.end(self._engine_request_id)
        # The engine may not have the request yet, and a beam search adds new ones.
        self._end_at(option, time.time() + _END_AGAIN_S)

    def close(self, *, broken: bool = False) -> None:
        """Stop following; `broken` means that the request has not ended here."""
        for timer in self._timers.values():
            timer.cancel()
        if self._engine_request_id is not None:
            self._engine.unfollow(self._engine_request_id)
        if self._trace is not None:
            self._trace.end(self.end(), broken=broken)

    def start(self, start: ResponseStart) -> ResponseStart:
        """Add tokens and journal to the start of a streamed answer."""
        return replace(
            start,
            journal=self.follower.take_journal(),
            num_tokens=self.follower.take_num_tokens(),
            continuable=self.follower.continuable,
            prompt_tokens=self.follower.prompt_tokens,
            certain_tokens=self.follower.certain_tokens,
        )

    def piece(self, body: bytes) -> Piece:
        """Make a piece of the answer, with the tokens and journal since the last part."""
        follower = self.follower
        return Piece(
            body,
            follower.take_journal(),
            follower.take_num_tokens(),
            follower.prompt_tokens,
            follower.certain_tokens,
        )

    def end(self) -> ResponseEnd:
        """Cost of the answer; without forks, one thread per choice.

        A beam search counts as one thread of unknown length, with the tokens of all its beams.
        """
        follower, trees = self.follower, self.follower.statistics
        if trees is None:
            num_roots = follower.num_roots
            alone = num_roots == 1 and not follower.searches_beams
            longest = follower.generated_tokens if alone else 0
            return ResponseEnd(
                follower.prompt_tokens, follower.generated_tokens, num_roots, 0, longest
            )
        return ResponseEnd(
            follower.prompt_tokens,
            follower.generated_tokens,
            trees.threads,
            trees.forks,
            trees.decode_steps,
        )

    def end_from(self, replica: str) -> ResponseEnd:
        """Cost of the answer, with the replica's id and the time spent there."""
        follower = self.follower
        return replace(
            self.end(),
            replica=replica,
            replica_s=round(time.monotonic() - self._arrived_s, 6),
            engine_s=round(max(follower.last_output_s - follower.began_s, 0.0), 6),
        )


class _Call:
    """One request inside the application; owns the task that runs it."""

    def __init__(self, request: RelayedRequest, followed: FollowedRequest | None) -> None:
        self._request = request
        self._followed = followed
        self._body_sent = False
        self._gone = asyncio.Event()
        self._wake = asyncio.Event()
        self._pieces: list[bytes] = []
        self.status: int | None = None
        self.headers: Headers = []
        self.complete = False
        self._task: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        self._task = asyncio.create_task(self._run(app))

    async def _run(self, app: ASGIApp) -> None:
        try:
            scope = {**self._request.scope(), SCOPE_KEY: self._followed}
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
        """Wait for output and return all since the last call; empty if the answer is complete."""
        while not self._pieces and not self.complete:
            self._wake.clear()
            await self._wake.wait()
        piece = b"".join(self._pieces)
        self._pieces.clear()
        return piece

    async def close(self) -> None:
        """Send the application a disconnect and wait until it has cleaned up.

        Cancelling the task would leave vLLM's own handler task running.
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
            # Starlette answers with a 500 and raises as well; the client has its answer.
            logger.error("error in the application", exc_info=error)


async def call_application(
    app: ASGIApp, request: RelayedRequest, followed: FollowedRequest | None = None
) -> AsyncGenerator[ResponseStart | bytes, None]:
    """Yield the application's answer: its start with the first piece, then the rest as it comes.

    Closing or cancelling the iterator acts as the client's disconnect.
    """
    call = _Call(request, followed)
    call.start(app)
    try:
        first = await call.next_piece()
        if call.status is None:
            await call.close()
            raise RuntimeError("the application ended without an answer")
        yield ResponseStart(call.status, call.headers, first)
        while piece := await call.next_piece():
            yield piece
    finally:
        await call.close()


class Answering:
    """The calls of a replica that answer clients' requests, and its health check."""

    def __init__(self, engine: AnsweringEngine, app: ASGIApp, replica_id: str) -> None:
        self._engine = engine
        self._app = app
        self._replica_id = replica_id
        self._engine_ends = False
        self._num_unanswered = 0
        # Counted as by Ray Serve's cap: once per call, however many choices it asks for.
        self.num_inside = 0
        self.metrics: ReplicaMetrics | None = None
        self.tracing: Tracing | None = None

    @property
    def engine_lost(self) -> bool:
        """Whether the engine is dead, hangs, or has aborted requests because it is shutting down.

        An engine may take seconds to shut down, and counts as dead only afterwards.
        """
        return self._engine_ends or self._engine.errored

    async def check_health(self) -> None:
        """Ray Serve's health check; raises EngineError if the engine is dead or does not answer.

        After two checks without an answer the engine counts as lost.
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

    async def alive(self) -> bool:
        """Return whether the engine answers now; called by gateways, which limit the time."""
        if self.engine_lost:
            return False
        await self._engine.core_state()
        return True

    async def stream(self, request: RelayedRequest) -> AsyncIterator[ResponsePart]:
        """Yield the answer piece by piece."""
        followed = self._follow(request)
        begun = False
        async with aclosing(self._answer(request, followed)) as parts:
            async for part in parts:
                begun = True
                if isinstance(part, ResponseStart):
                    yield followed.start(part)
                else:
                    yield followed.piece(part)
        broken = self._broken(followed)
        if broken is not None and begun:
            # Another replica need not regenerate the tokens since the last piece.
            yield followed.piece(b"")
        yield broken or followed.end_from(self._replica_id)

    async def whole(self, request: RelayedRequest) -> AsyncIterator[WholeResponse]:
        """Yield token counts now and then, and last the whole answer with its cost."""
        followed = self._follow(request)
        reported = Piece(b"")
        answer = asyncio.create_task(self._joined(request, followed))
        began_s, period_s = time.monotonic(), PROGRESS_S
        try:
            while not (await asyncio.wait([answer], timeout=period_s))[0]:
                period_s = max(PROGRESS_S, _PROGRESS_SHARE * (time.monotonic() - began_s))
                piece = followed.piece(b"")
                if piece.num_tokens or piece.prompt_tokens != reported.prompt_tokens:
                    yield piece
                reported = piece
            start = answer.result()
        finally:
            # If the client has left, the application receives a disconnect and cleans up.
            answer.cancel()
            await asyncio.wait([answer])
        broken = self._broken(followed)
        if broken is not None:
            yield followed.piece(b"")
        yield broken or (start, followed.end_from(self._replica_id))

    def _follow(self, request: RelayedRequest) -> FollowedRequest:
        terms = request.terms
        trace = start_engine_trace(self.tracing, terms.trace_headers, self._replica_id)
        return FollowedRequest(self._engine, terms, trace)

    async def _joined(self, request: RelayedRequest, followed: FollowedRequest) -> ResponseStart:
        start = ResponseStart(500, [], b"")
        pieces: list[bytes] = []
        async with aclosing(self._answer(request, followed)) as parts:
            async for part in parts:
                if isinstance(part, ResponseStart):
                    start = part
                    pieces.append(part.body)
                else:
                    pieces.append(part)
        return ResponseStart(start.status, start.headers, b"".join(pieces))

    async def _answer(
        self, request: RelayedRequest, followed: FollowedRequest
    ) -> AsyncGenerator[ResponseStart | bytes, None]:
        """Yield the application's answer until the engine dies or aborts the request.

        After that vLLM answers with some error, or ends the text as if it were complete, although
        nothing is wrong with the request.
        """
        self.num_inside += 1
        try:
            if self.engine_lost:
                # The watchdog is about to end this process, which tells Ray Serve that it is gone.
                # A replica that refused at once would look idle and attract every retry.
                await asyncio.sleep(ENGINE_ANSWER_S)
            async with aclosing(call_application(self._app, request, followed)) as parts:
                async for part in parts:
                    if self._broken(followed):
                        return
                    if followed.missed is not None and isinstance(part, ResponseStart):
                        yield _missed(followed.missed)
                        return
                    yield part
        except Exception:
            if not self._broken(followed):
                raise
        finally:
            self._engine_ends |= followed.follower.aborted
            followed.close(broken=self._broken(followed) is not None)
            self.num_inside -= 1
            if self.metrics is not None and not self._broken(followed):
                self.metrics.finished(followed.follower)

    def _broken(self, followed: FollowedRequest) -> ResponseBroken | None:
        """Return why the replica cannot continue an answer; None while it can."""
        # Check aborts first: an engine that shuts down aborts its requests, then counts as dead.
        if followed.follower.aborted:
            return ResponseBroken("the engine has aborted the request")
        if self._engine.errored:
            return ResponseBroken("the engine has died", engine_died=True)
        return None


def _missed(option: str) -> ResponseStart:
    """Return the answer to a request without a token at its deadline."""
    answer = response_for(DeadlineError(option, "the engine had no token of it in time"))
    return ResponseStart(answer.status, answer.headers, answer.body)
