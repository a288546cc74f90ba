"""Middleware in front of Ray Serve's own handling of HTTP requests.

Ray Serve's HTTP servers (the gateway's, behind HAProxy, and the Python proxy) read some headers
before the application sees a request. Headers with which a client could control them are removed:

- `x-request-timeout-seconds` sets a timeout, after which Ray Serve answers a plain-text 408.
- `x-request-disconnect-disabled` turns off the detection of disconnects, so that an abandoned
  request runs to its end.
- `x-session-id` and `serve-multiplexed-model-id` choose a replica of the gateway, and cause a 500
  if they are not UTF-8.

Ray Serve also reads the whole body of a request before the application asks for it. The body of a
GET or HEAD request, which no route reads, is therefore dropped here.

POST requests bypass Ray Serve where the gateway runs in this event loop. Ray Serve then makes no
context for them and leaves them out of its own counts. A gateway that stops still finishes them,
because uvicorn waits for them.

Each process with such a server calls `middlewares`, which SERVE_FLAGS names.
"""

import asyncio
import logging
import uuid
from typing import Any, cast

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

logger = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
BYPASSES_SERVE = "apar.bypasses_serve"
"""Scope key of a request that bypassed Ray Serve, which returns the ids of all others."""
STEERING_HEADERS = frozenset(
    {
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"x-session-id",
        b"serve-multiplexed-model-id",
    }
)


class WithoutSteeringHeaders:
    """ASGI middleware in front of Ray Serve's own handling of a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on without these headers."""
        # ASGI servers give names in lower case. Ray Serve accepts `_` for `-` in some of them.
        headers = [
            item for item in scope["headers"] if item[0].replace(b"_", b"-") not in STEERING_HEADERS
        ]
        if scope.get("method") in ("GET", "HEAD"):
            receive = _without_body(receive)
        elif scope.get("method") == "POST" and SHORTCUT.is_open:
            # It tells whether the answer is complete.
            cycle = getattr(send, "__self__", None)
            if isinstance(cycle, RequestResponseCycle):
                await SHORTCUT.serve({**scope, "headers": headers}, receive, cycle)
                return
        await self._app({**scope, "headers": headers}, receive, send)


class Shortcut:
    """Route to this process's gateway that bypasses Ray Serve, once the gateway has opened it.

    Ray Serve makes the middleware and the gateway, so neither can be given the other.
    """

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, app: ASGIApp) -> None:
        """Serve requests of the running event loop with this application."""
        self._app, self._loop = app, asyncio.get_running_loop()

    def close(self) -> None:
        """Let new requests go through Ray Serve."""
        self._app = None

    @property
    def is_open(self) -> bool:
        """Whether the application can serve a request in the running event loop."""
        return self._app is not None and self._loop is asyncio.get_running_loop()

    async def serve(self, scope: Scope, receive: Receive, cycle: RequestResponseCycle) -> None:
        """Serve a request, which is cancelled if its client leaves."""
        assert self._app is not None
        if all(name != REQUEST_ID for name, _ in scope["headers"]):
            scope["headers"].append((REQUEST_ID, str(uuid.uuid4()).encode()))
        # uvicorn only writes to it, closes it, and asks whether it is closing.
        cycle.transport = cast(asyncio.Transport, HeadWithBody(cycle.transport))
        client = _Client(receive, cycle)
        try:
            await self._app({**scope, BYPASSES_SERVE: True}, client.receive, cast(Send, cycle.send))
        except asyncio.CancelledError:
            if not client.has_left:
                raise
        except Exception:
            # uvicorn ends the answer, but Ray Serve has silenced its log.
            logger.exception("request failed", extra={"path": scope["path"]})
            raise
        finally:
            client.close()


SHORTCUT = Shortcut()


class _Client:
    """The client of a request; cancels the current task if it leaves."""

    def __init__(self, receive: Receive, cycle: RequestResponseCycle) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._receive = receive
        self._cycle = cycle
        self._departure: asyncio.Task[None] | None = None
        self.has_left = False

    async def receive(self) -> Message:
        """Return the next message of the body; after the last one, watch for the disconnect."""
        if self._departure is not None:
            await asyncio.wait([self._departure])
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._leave()
            await asyncio.sleep(0)  # Cancelled here.
        elif not message.get("more_body", False):
            self._departure = asyncio.create_task(self._watch())
        return message

    def close(self) -> None:
        """Stop watching."""
        if self._departure is not None:
            self._departure.cancel()

    async def _watch(self) -> None:
        # Ignore anything after the body.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # uvicorn also says this when the answer is complete.
        if not self._cycle.response_complete:
            self._leave()

    def _leave(self) -> None:
        self.has_left = True
        self._task.cancel()


class HeadWithBody:
    """Transport of one answer that sends its head together with the first piece of its body.

    uvicorn writes them one after the other. Each write is a packet, which wakes HAProxy and the
    client. A head without a body is sent in the next turn of the event loop.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        # None before the first write, empty once it has been sent.
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        """Send data; hold the first for the second."""
        if self._head is None:
            self._head = data
            asyncio.get_running_loop().call_soon(self._send_head)
        else:
            data, self._head = self._head + data, b""
            self._transport.write(data)

    def close(self) -> None:
        """Send what is held, and close the transport."""
        self._send_head()
        self._transport.close()

    def _send_head(self) -> None:
        if self._head and not self._transport.is_closing():
            self.write(b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _without_body(receive: Receive) -> Receive:
    """Return a `receive` that gives an empty body, and later the client's disconnect."""
    has_begun = False

    async def receive_no_body() -> Message:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message

    return receive_no_body


def middlewares() -> list[Middleware]:
    """Return the middlewares for Ray Serve's HTTP servers."""
    return [Middleware(WithoutSteeringHeaders)]
