"""The HTTP ingress: finds the model, bounds the queue, relays a replica's answer.

Every error that leaves it has OpenAI's form, and a stream that breaks off behind it ends with
an error event and `[DONE]`, never with a cut connection or a hang.
"""

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from apar_core.errors import CapacityError, EngineError, RequestError
from deployments.admission import Admission
from deployments.asgi_relay import AnswerStart, Headers, Receive, RelayedRequest, Scope, Send
from deployments.error_responses import (
    DONE_EVENT,
    JSON_TYPE,
    ErrorAnswer,
    answer_for,
    engine_lost,
    internal_error,
    no_replica,
    normalised,
    unknown_model,
    unknown_route,
    wrong_method,
)

logger = logging.getLogger(__name__)

HEALTH_PATH = "/health"
# What is relayed; vLLM's other routes take token ids or control the engine.
ROUTES = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/models": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/version": "GET",
}
_PASSED_HEADERS = (b"content-type", b"x-request-id")
# The server before us sets these for its own connection.
_HOP_HEADERS = (b"content-length", b"connection", b"transfer-encoding", b"date", b"server")


class GatewaySettings(BaseModel):
    """Limits of one gateway."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    max_running: PositiveInt
    max_queued: NonNegativeInt
    max_body_bytes: PositiveInt = 16 * 2**20


class ReplicaCalls(Protocol):
    """The calls that a gateway makes, over a Ray Serve handle or directly."""

    def stream(self, request: RelayedRequest) -> AsyncGenerator[AnswerStart | bytes, None]:
        """The answer piece by piece; closing the iterator cancels the request."""

    async def whole(self, request: RelayedRequest) -> AnswerStart:
        """The answer in one piece; cancelling the call cancels the request."""


class BodyTooLargeError(RequestError):
    """The request's body is over the limit: HTTP 413."""


class UnknownModelError(RequestError):
    """The request names a model that is not served here: HTTP 404."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown model {name}", param="model")
        self.name = name


class ReplicaLostError(EngineError):
    """The replica died, or cannot be reached, while it held a request."""


class Gateway:
    """ASGI application in front of the replicas of one model."""

    def __init__(
        self,
        settings: GatewaySettings,
        replicas: ReplicaCalls,
        is_healthy: Callable[[], Awaitable[bool]],
    ) -> None:
        self._settings = settings
        self._replicas = replicas
        self._is_healthy = is_healthy
        self._admission = Admission(
            max_running=settings.max_running, max_queued=settings.max_queued
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        if scope["type"] != "http":
            await _answer_lifespan(receive, send)
            return
        method, path = scope["method"], scope["path"]
        if path == HEALTH_PATH and method in ("GET", "HEAD"):
            await self._answer_health(send)
            return
        allowed = ROUTES.get(path)
        if allowed != method:
            known = allowed is not None or path == HEALTH_PATH
            await _send_error(send, (wrong_method if known else unknown_route)(method, path))
            return
        try:
            body = await self._read_body(receive)
            fields = _fields(body) if method == "POST" else {}
            self._check_model(fields)
            with self._admission.admit():
                await self._relay(_relayed(scope, body), bool(fields.get("stream")), send)
        except BodyTooLargeError as error:
            await _send_error(send, ErrorAnswer(413, str(error)))
        except UnknownModelError as error:
            await _send_error(send, unknown_model(error.name))
        except (RequestError, CapacityError) as error:
            await _send_error(send, answer_for(error))

    async def _answer_health(self, send: Send) -> None:
        if await self._is_healthy():
            await _send_whole(send, AnswerStart(200, [JSON_TYPE], b'{"status":"ok"}'))
        else:
            await _send_error(send, no_replica())

    async def _read_body(self, receive: Receive) -> bytes:
        pieces: list[bytes] = []
        room = self._settings.max_body_bytes
        while True:
            message = await receive()
            pieces.append(message.get("body", b""))
            room -= len(pieces[-1])
            if room < 0:
                limit = self._settings.max_body_bytes
                raise BodyTooLargeError(f"The body is larger than {limit} bytes.")
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return b"".join(pieces)

    def _check_model(self, fields: dict[str, Any]) -> None:
        name = fields.get("model")
        if name is None or name == self._settings.model:
            return
        if not isinstance(name, str):
            raise RequestError("`model` must be a string", param="model")
        raise UnknownModelError(name)

    async def _relay(self, request: RelayedRequest, streaming: bool, send: Send) -> None:
        try:
            if streaming:
                await self._relay_stream(request, send)
            else:
                await _send_whole(send, await self._replicas.whole(request))
        except Exception as error:  # noqa: BLE001  # the boundary: logged, and answered
            await _send_error(send, _answer_for_failure(error, request))

    async def _relay_stream(self, request: RelayedRequest, send: Send) -> None:
        """Relay the parts as they come; raises only before the first one."""
        async with aclosing(self._replicas.stream(request)) as parts:
            start = await anext(parts)
            if not isinstance(start, AnswerStart):
                raise TypeError("a replica's answer must begin with its start")
            if start.status >= 400:
                rest = [part async for part in parts if isinstance(part, bytes)]
                body = b"".join([start.body, *rest])
                await _send_whole(send, AnswerStart(start.status, start.headers, body))
                return
            await _send_start(send, start.status, start.headers)
            await _send_piece(send, start.body)
            tail = start.body[-len(DONE_EVENT) :]
            try:
                async for part in parts:
                    if isinstance(part, bytes):
                        tail = (tail + part)[-len(DONE_EVENT) :]
                        await _send_piece(send, part)
            except Exception as error:  # noqa: BLE001  # the boundary: logged, and answered
                answer = _answer_for_failure(error, request)
                if tail != DONE_EVENT:
                    # The last event may have been cut in half; a line break ends it.
                    await _send_piece(send, b"\n\n" * (tail[-2:] != b"\n\n") + answer.events)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _answer_for_failure(error: Exception, request: RelayedRequest) -> ErrorAnswer:
    """What a client is told when its request failed behind the gateway."""
    if isinstance(error, ReplicaLostError):
        logger.warning("replica lost under a request", extra={"path": request.path})
        return engine_lost()
    logger.error("request failed", extra={"path": request.path}, exc_info=error)
    return internal_error()


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    """Ray Serve runs the lifespan of every ingress; there is nothing to set up here."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    return fields


def _relayed(scope: Scope, body: bytes) -> RelayedRequest:
    headers = [item for item in scope["headers"] if item[0] in _PASSED_HEADERS]
    return RelayedRequest(scope["method"], scope["path"], scope["query_string"], headers, body)


async def _send_start(send: Send, status: int, headers: Headers) -> None:
    kept = [item for item in headers if item[0].lower() not in _HOP_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": kept})


async def _send_piece(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_whole(send: Send, answer: AnswerStart) -> None:
    body = normalised(answer.status, answer.body) if answer.status >= 400 else answer.body
    kept = [item for item in answer.headers if item[0].lower() not in _HOP_HEADERS]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": answer.status, "headers": [*kept, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_error(send: Send, answer: ErrorAnswer) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
