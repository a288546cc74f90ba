"""Removes the request headers with which a client could steer Ray Serve.

Ray Serve's HTTP servers, the gateway's behind HAProxy and the Python proxy, read two headers before
the application sees the request. `x-request-timeout-seconds` sets a timeout, after which Ray Serve
answers with a plain-text 408. `x-request-disconnect-disabled` turns off the check for disconnected
clients, so that an abandoned request runs to its end. Ray Serve calls `middlewares`, which
SERVE_FLAGS names, in each process with such a server.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

STEERING_HEADERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})


class WithoutSteeringHeaders:
    """ASGI middleware in front of Ray Serve's own handling of a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on without the headers that steer Ray Serve."""
        # ASGI servers give names in lower case.
        headers = [item for item in scope["headers"] if item[0] not in STEERING_HEADERS]
        await self._app({**scope, "headers": headers}, receive, send)


def middlewares() -> list[Middleware]:
    """The middlewares that Ray Serve puts around its HTTP servers."""
    return [Middleware(WithoutSteeringHeaders)]
