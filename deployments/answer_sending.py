"""Writes answers to the client, in ASGI's messages."""

from deployments.answer_parts import AnswerStart, Headers
from deployments.asgi_relay import Send
from deployments.error_responses import ErrorAnswer, normalised

# The server before us sets these for its own connection.
_HOP_HEADERS = (b"content-length", b"connection", b"transfer-encoding", b"date", b"server")


async def send_start(send: Send, status: int, headers: Headers) -> None:
    """Send the status and headers of an answer that comes in pieces."""
    kept = [item for item in headers if item[0].lower() not in _HOP_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": kept})


async def send_piece(send: Send, body: bytes) -> None:
    """Send a piece of the body, if there is anything in it."""
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def send_end(send: Send) -> None:
    """End an answer that came in pieces."""
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_whole(send: Send, answer: AnswerStart) -> None:
    """Send an answer in one piece, an error in OpenAI's form."""
    body = normalised(answer.status, answer.body) if answer.status >= 400 else answer.body
    kept = [item for item in answer.headers if item[0].lower() not in _HOP_HEADERS]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": answer.status, "headers": [*kept, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, answer: ErrorAnswer) -> None:
    """Send an error of our own."""
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
