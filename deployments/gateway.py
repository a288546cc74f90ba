"""The HTTP ingress: finds the model, bounds its queue, relays a replica's answer.

Every error that leaves it has OpenAI's form.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from apar_core.errors import CapacityError, RequestError
from deployments.admission import Admission
from deployments.answer_parts import AnswerStart
from deployments.answers import ReplicaCalls, relay_answer, send_error, send_whole, whole_answer
from deployments.asgi_relay import Receive, RelayedRequest, Scope, Send
from deployments.error_responses import (
    JSON_TYPE,
    ErrorAnswer,
    answer_for,
    no_replica,
    unknown_model,
    unknown_route,
    wrong_method,
)

HEALTH_PATH = "/health"
MODELS_PATH = "/v1/models"
# What is relayed; vLLM's other routes take token ids or control the engine.
ROUTES = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    MODELS_PATH: "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/version": "GET",
}
_PASSED_HEADERS = (b"content-type", b"x-request-id")


class ServedModel(BaseModel):
    """A model's name, and how many of its requests the gateway lets in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    max_running: PositiveInt
    max_queued: NonNegativeInt


class GatewaySettings(BaseModel):
    """What one gateway serves, and its limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: tuple[ServedModel, ...]
    max_body_bytes: PositiveInt = 16 * 2**20
    # A call to a model without a replica waits until there is one again.
    models_wait_s: PositiveFloat = 5.0


class BodyTooLargeError(RequestError):
    """The request's body is over the limit: HTTP 413."""


class UnknownModelError(RequestError):
    """The request names a model that is not served here: HTTP 404."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown model {name}", param="model")
        self.name = name


@dataclass(frozen=True, slots=True)
class _Model:
    """A served model: its replicas, and who may go to them."""

    replicas: ReplicaCalls
    admission: Admission


class Gateway:
    """ASGI application in front of the replicas of one or more models."""

    def __init__(
        self,
        settings: GatewaySettings,
        replicas: Sequence[ReplicaCalls],
        is_healthy: Callable[[], Awaitable[bool]],
    ) -> None:
        """`replicas` are those of the settings' models, in their order."""
        self._settings = settings
        self._is_healthy = is_healthy
        self._models = {
            model.name: _Model(
                calls, Admission(max_running=model.max_running, max_queued=model.max_queued)
            )
            for model, calls in zip(settings.models, replicas, strict=True)
        }
        # What replicas say of their model, by the model's name.
        self._cards: dict[str, list[Any]] = {}

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
            await send_error(send, (wrong_method if known else unknown_route)(method, path))
            return
        try:
            request = _relayed(scope, await self._read_body(receive))
            if path == MODELS_PATH:
                await self._answer_models(request, send)
                return
            fields = _fields(request.body) if method == "POST" else {}
            model = self._model(fields, needed=method == "POST")
            with model.admission.admit():
                await relay_answer(model.replicas, request, bool(fields.get("stream")), send)
        except BodyTooLargeError as error:
            await send_error(send, ErrorAnswer(413, str(error)))
        except UnknownModelError as error:
            await send_error(send, unknown_model(error.name))
        except (RequestError, CapacityError) as error:
            await send_error(send, answer_for(error))

    async def _answer_health(self, send: Send) -> None:
        if await self._is_healthy():
            await send_whole(send, AnswerStart(200, [JSON_TYPE], b'{"status":"ok"}'))
        else:
            await send_error(send, no_replica())

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

    def _model(self, fields: dict[str, Any], *, needed: bool) -> _Model:
        """The model that a request is for; without a name, the first where that is certain."""
        name = fields.get("model")
        if name is None:
            if needed and len(self._models) > 1:
                raise RequestError(
                    f"`model` is missing; served here: {', '.join(self._models)}", param="model"
                )
            return next(iter(self._models.values()))
        if not isinstance(name, str):
            raise RequestError("`model` must be a string", param="model")
        if name not in self._models:
            raise UnknownModelError(name)
        return self._models[name]

    async def _answer_models(self, request: RelayedRequest, send: Send) -> None:
        """The list of all models, each as its replicas describe it, asked for once.

        A model whose replicas cannot answer in time is left out; if none can, the error of one
        of them is the answer.
        """
        unknown = [name for name in self._models if name not in self._cards]
        answers = await asyncio.gather(*(self._described(name, request) for name in unknown))
        for name, answer in zip(unknown, answers, strict=True):
            if answer.status == HTTPStatus.OK:
                self._cards[name] = json.loads(answer.body)["data"]
        if not self._cards:
            await send_whole(send, answers[0])
            return
        cards = [card for name in self._models for card in self._cards.get(name, ())]
        body = json.dumps({"object": "list", "data": cards}).encode()
        await send_whole(send, AnswerStart(HTTPStatus.OK, [JSON_TYPE], body))

    async def _described(self, name: str, request: RelayedRequest) -> AnswerStart:
        try:
            async with asyncio.timeout(self._settings.models_wait_s):
                return await whole_answer(self._models[name].replicas, request)
        except TimeoutError:
            answer = no_replica()
            return AnswerStart(answer.status, answer.headers, answer.body)


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
