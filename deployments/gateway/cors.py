"""Cross-origin requests of browsers (CORS), with the settings of `cors` in the configuration."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.config.cors import CorsConfig

_METHODS = ("GET", "POST", "DELETE")
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

    Without origins, it passes everything on. The settings can change while requests run.
    """

    def __init__(self, app: ASGIApp, config: CorsConfig) -> None:
        self._app = app
        self.configure(config)

    def configure(self, config: CorsConfig) -> None:
        """Apply new settings to requests that arrive from now on."""
        self._outer = self._app
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
        await self._outer(scope, receive, send)
