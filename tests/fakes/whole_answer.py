"""An ASGI application's answer as one value."""

from starlette.types import ASGIApp

from deployments.replica.answering import ServedRequest, relay
from deployments.wire.answer import AnswerStart
from deployments.wire.request import RelayedRequest


async def relay_whole(
    app: ASGIApp, request: RelayedRequest, served: ServedRequest | None = None
) -> AnswerStart:
    """Return the application's whole answer in one piece."""
    start: AnswerStart | None = None
    pieces: list[bytes] = []
    async for part in relay(app, request, served):
        if isinstance(part, AnswerStart):
            start = part
            pieces.append(part.body)
        else:
            pieces.append(part)
    assert start is not None
    return AnswerStart(start.status, start.headers, b"".join(pieces))
