"""Middleware that removes request headers with which a client could control Ray Serve.

Ray Serve's HTTP servers (the gateway's, behind HAProxy, and the Python proxy) read these headers
before the application sees the request:

- `x-request-timeout-seconds` sets a timeout, after which Ray Serve answers a plain-text 408.
- `x-request-disconnect-disabled` turns off the detection of disconnects, so that an abandoned
  request runs to its end.
- `x-session-id` and `serve-multiplexed-model-id` choose a replica of the gateway, and cause a 500
  if they are not UTF-8.

Ray Serve also reads the whole body of a request before the application asks for it. The body of a
GET or HEAD request, which no route reads, is therefore dropped here.

Each process with such a server calls `middlewares`, which SERVE_FLAGS names.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
        await self._app({**scope, "headers": headers}, receive, send)


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
