"""Call an ASGI application in process and join its answer."""

from starlette.types import ASGIApp

from deployments.replica.answering import FollowedRequest, call_application
from deployments.wire.request import RelayedRequest
from deployments.wire.response import ResponseStart


async def whole_response(
    app: ASGIApp, request: RelayedRequest, followed: FollowedRequest | None = None
) -> ResponseStart:
    """Return the application's whole answer in one part."""
    start: ResponseStart | None = None
    pieces: list[bytes] = []
    async for part in call_application(app, request, followed):
        if isinstance(part, ResponseStart):
            start = part
            pieces.append(part.body)
        else:
            pieces.append(part)
    assert start is not None
    return ResponseStart(start.status, start.headers, b"".join(pieces))
