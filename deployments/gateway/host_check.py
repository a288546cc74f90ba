"""Refusal of requests that are not for this server, if it listens on a loopback address."""

from collections.abc import Callable
from dataclasses import replace

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.client_headers import BYPASSES_SERVE, REQUEST_ID
from deployments.local_names import names_this_machine
from deployments.relay.relay import send_error
from deployments.wire.errors import MisdirectedError, response_for
from deployments.wire.routes import form_of


class HostCheck:
    """ASGI middleware that compares `Host` with the names of this machine.

    `names` are further names that are allowed, in lower case; None if requests are not checked.
    They can change while requests run.
    """

    def __init__(
        self, app: ASGIApp, names: tuple[str, ...] | None, refused: Callable[[], None]
    ) -> None:
        """`refused` is called for each refused request."""
        self._app = app
        self.names = names
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; requests without `Host` pass, as they come from no browser."""
        if scope["type"] == "http" and self.names is not None:
            for name, value in scope["headers"]:
                host = value.decode("latin-1")
                if name == b"host" and not names_this_machine(host, self.names):
                    self._refused()
                    error = response_for(MisdirectedError(host[:128])).in_form(
                        form_of(scope["path"])
                    )
                    if BYPASSES_SERVE in scope:
                        ids = [item for item in scope["headers"] if item[0] == REQUEST_ID]
                        error = replace(error, extra_headers=(*error.extra_headers, *ids))
                    await send_error(send, error)
                    return
        await self._app(scope, receive, send)
