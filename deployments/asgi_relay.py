"""Runs an ASGI application in process and hands its answer on piece by piece."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.answer_parts import AnswerStart, Headers
from deployments.request_terms import RequestTerms
from deployments.routing.views import RequestHint

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

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


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """An HTTP request on its way from the gateway to a replica, which must take it in time."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    terms: RequestTerms = field(default_factory=RequestTerms)
    hint: RequestHint = field(default_factory=RequestHint)
    replica_wait_s: float = 60.0

    def scope(self) -> Scope:
        """The ASGI scope of this request.

        The version below 2.4 makes Starlette listen for `http.disconnect` during a stream.
        """
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": None,
            "server": None,
            "state": {},
        }


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

    def start(self, app: AsgiApp) -> None:
        """Run the application on this request."""
        self._task = asyncio.create_task(self._run(app))

    async def _run(self, app: AsgiApp) -> None:
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
    app: AsgiApp, request: RelayedRequest, served: ServedRequest | None = None
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


async def relay_whole(
    app: AsgiApp, request: RelayedRequest, served: ServedRequest | None = None
) -> AnswerStart:
    """The application's whole answer in one piece."""
    start: AnswerStart | None = None
    pieces: list[bytes] = []
    async for part in relay(app, request, served):
        if isinstance(part, AnswerStart):
            start = part
            pieces.append(part.body)
        else:
            pieces.append(part)
    if start is None:
        raise RuntimeError("the application ended without an answer")
    return AnswerStart(start.status, start.headers, b"".join(pieces))
