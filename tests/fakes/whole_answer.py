"""Call an ASGI application in process and join its answer."""

from starlette.types import ASGIApp

from deployments.replica.answering import FollowedRequest, call_application
from deployments.wire.answer import AnswerStart
from deployments.wire.request import RelayedRequest


async def whole_answer(
    app: ASGIApp, request: RelayedRequest, followed: FollowedRequest | None = None
) -> AnswerStart:
    """Return the application's whole answer in one part."""
    start: AnswerStart | None = None
    pieces: list[bytes] = []
    async for part in call_application(app, request, followed):
        if isinstance(part, AnswerStart):
            start = part
            pieces.append(part.body)
        else:
            pieces.append(part)
    assert start is not None
    return AnswerStart(start.status, start.headers, b"".join(pieces))
