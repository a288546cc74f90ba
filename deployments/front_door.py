"""What stands before the gateway: lets requests in, and out again in peace before the end."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from deployments.answer_parts import AnswerStart
from deployments.answers import send_error, send_whole
from deployments.asgi_relay import AsgiApp, Message, Receive, Scope, Send
from deployments.error_responses import JSON_TYPE, ErrorAnswer

LIVE_PATH = "/live"
_EVENTS = b"text/event-stream"
_RETRY_AFTER_S = 5.0


def draining() -> ErrorAnswer:
    """The answer to a new request, and to /health, while the running ones end."""
    return ErrorAnswer(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "The server is stopping; please send the request again.",
        code="draining",
        retry_after_s=_RETRY_AFTER_S,
    )


class FrontDoor:
    """ASGI middleware: counts the requests inside, refuses new ones once it is closed."""

    def __init__(self, app: AsgiApp, refused: Callable[[], None] = lambda: None) -> None:
        """`refused` is told of each request that comes too late."""
        self._app = app
        self._refused = refused
        self._tasks: dict[asyncio.Task[object], bool] = {}
        self._closed = False

    @property
    def inside(self) -> int:
        """Requests let in and not yet answered."""
        return len(self._tasks)

    def close(self) -> None:
        """Let no further request in."""
        self._closed = True

    def cut(self) -> int:
        """End the requests that are still inside, each with an error; returns how many."""
        self.close()
        for task in self._tasks:
            self._tasks[task] = True
            task.cancel()
        return len(self._tasks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == LIVE_PATH:
            await send_whole(send, AnswerStart(HTTPStatus.OK, [JSON_TYPE], b'{"status":"ok"}'))
        elif self._closed:
            self._refused()
            await send_error(send, draining())
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = False
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if not self._tasks[task]:
                raise
            task.uncancel()
            await answer.end_with(draining())
        finally:
            del self._tasks[task]


class _Answer:
    """How far the answer to one request has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self._ended = False
        self._is_stream = False
        self._tail = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            headers = dict(message["headers"])
            self._is_stream = headers.get(b"content-type", b"").startswith(_EVENTS)
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
            self._tail = (self._tail + message.get("body", b""))[-2:]
        await self._send(message)

    async def end_with(self, error: ErrorAnswer) -> None:
        """The error in the place of what has not been sent; nothing where all has been."""
        if not self._started:
            await send_error(self._send, error)
        elif not self._ended:
            # The last event may have been cut in half; a line break ends it.
            events = (b"" if self._tail in (b"", b"\n\n") else b"\n\n") + error.events
            body = events if self._is_stream else b""
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
