"""Runs an ASGI application in process and hands its answer on piece by piece."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Protocol

from starlette.types import ASGIApp, Message

from deployments.wire.answer import AnswerStart, Headers
from deployments.wire.request import RelayedRequest, RequestTerms

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
