"""Cross-origin requests of browsers (CORS), with the settings of `cors` in the configuration."""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.config.cors import CorsConfig
from deployments.relay.relay import send_error
from deployments.wire.errors import OriginError, response_for
from deployments.wire.routes import form_of

_METHODS = ("GET", "POST", "DELETE")
# Fetch standard, "CORS-safelisted request-header": pages send these without a preflight request.
_SIMPLE_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
# Response headers that a page may read, besides those that it may always read.
_EXPOSED = (
    "x-request-id",
    "retry-after",
    *(
        f"x-ratelimit-{name}-{kind}"
        for kind in ("requests", "tokens")
        for name in ("limit", "remaining", "reset")
    ),
)


class Cors:
    """ASGI middleware that answers preflight requests and adds CORS headers to responses.

    It refuses forms of pages of other origins, which browsers send without asking: an upload would
    take effect although the page sees no answer. The settings can change while requests run.
    """

    def __init__(self, app: ASGIApp, config: CorsConfig, refused: Callable[[], None]) -> None:
        """`refused` is called for each refused form."""
        self._app = app
        self._refused = refused
        self.configure(config)

    def configure(self, config: CorsConfig) -> None:
        """Apply new settings to requests that arrive from now on."""
        self._outer = self._app
        self._origins = config.origins
        if config.origins:
            self._outer = CORSMiddleware(
                self._app,
                allow_origins=config.origins,
                allow_methods=_METHODS,
                # Clients send many of their own, such as `x-stainless-*` and `anthropic-version`.
                allow_headers=["*"],
                expose_headers=_EXPOSED,
                max_age=config.max_age_s,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = Headers(scope=scope)
            origin = headers.get("origin", "")
            if self._is_foreign(origin, headers.get("host")) and _is_simple(headers):
                self._refused()
                error = response_for(OriginError(origin[:128]))
                await send_error(send, error.in_form(form_of(scope["path"])))
                return
        await self._outer(scope, receive, send)

    def _is_foreign(self, origin: str, host: str | None) -> bool:
        """Return whether a page of another origin, which is not allowed, sends a request.

        Other programs than web pages, such as editors, have schemes of their own and pass.
        """
        return (
            origin.startswith(("http://", "https://", "null"))
            and origin.partition("://")[2] != host
            and not {origin, "*"} & set(self._origins)
        )


def _is_simple(headers: Headers) -> bool:
    """Return whether browsers send a POST request with these headers without a preflight."""
    content_type = headers.get("content-type", "text/plain").partition(";")[0]
    return content_type.strip().lower() in _SIMPLE_TYPES
