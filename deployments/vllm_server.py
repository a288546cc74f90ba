"""The `apar` field of requests and answers in vLLM's own server, without a gateway.

Middleware that a user adds with vLLM's option, in front of an engine that forks:

    vllm serve MODEL --scheduler-cls ... --middleware deployments.vllm_server.AparField

Fields and answers are those of `apar serve` (`deployments/replica/apar_extension.py`), apart from
the options that its gateway acts on, which are refused. A request without the field passes through
unchanged, and so does every request to an engine that does not fork.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apar_core.engine.request_follower import RequestFollower
from apar_core.engine.thread_tags import StreamTags
from apar_core.errors import RequestError
from deployments.replica.apar_extension import (
    WRITERS,
    AparOptions,
    AparWriter,
    ResponseWriter,
    move_options,
    parse_options,
)
from deployments.wire.errors import response_for
from deployments.wire.routes import ROUTES, ResponseForm, Route

_FIELD = "apar"
_QUOTED_FIELD = b'"apar"'
_ID_HEADER = b"x-request-id"
_OF_THE_GATEWAY = ("deadline_ms", "first_token_deadline_ms", "expected_tokens", "parent_request_id")


class AparField:
    """ASGI middleware for all routes that generate text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        engine = _forking_engine(scope)
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
        route = ROUTES.get(path) if scope.get("method") == "POST" else None
        if engine is None or route is None or route.engine_id is None or not route.forks:
            await self._app(scope, receive, send)
            return
        engine_id = self._name(scope, route.engine_id)
        exchange = _Exchange(engine, route, engine_id, receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            exchange.close()

    def _name(self, scope: Scope, pattern: str) -> str:
        """Return the id by which the engine will know a request, which begins as its client's.

        What follows no other client can guess: two requests at once may have the same id, or one
        that looks like a part of the other's.
        """
        given = [value for name, value in scope["headers"] if name == _ID_HEADER]
        own = uuid.uuid4().hex[:16]
        base = f"{given[-1].decode('latin-1')}-{own}" if given else own
        others = [header for header in scope["headers"] if header[0] != _ID_HEADER]
        scope["headers"] = [*others, (_ID_HEADER, base.encode("latin-1"))]
        return pattern.format(base)


class _Exchange:
    """One request and its answer.

    The body is read when the application asks for it: vLLM's check of API keys, which lies behind
    this middleware, refuses a request before that.
    """

    def __init__(
        self, engine: Any, route: Route, engine_id: str, receive: Receive, send: Send
    ) -> None:
        self._engine = engine
        self._route = route
        self._engine_id = engine_id
        self._receive = receive
        self._send = send
        self._has_read = False
        self._writer: AparWriter | None = None
        self._updates: asyncio.Task[None] | None = None
        self._refusal: RequestError | None = None
        self._has_refused = False

    async def receive(self) -> Message:
        """Return the body without the field, then what the client sends after it."""
        if self._has_read:
            return await self._receive()
        pieces: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        self._has_read = True
        return {"type": "http.request", "body": self._body(b"".join(pieces)), "more_body": False}

    async def send(self, message: Message) -> None:
        """Send a part of the answer, with the `apar` object where it belongs."""
        if self._refusal is not None:
            # The application has answered an empty body instead.
            if not self._has_refused:
                self._has_refused = True
                answer = response_for(self._refusal).in_form(self._route.form)
                start = {"status": answer.status, "headers": answer.headers}
                await self._send({"type": "http.response.start", **start})
                await self._send({"type": "http.response.body", "body": answer.body})
        elif self._writer is not None:
            await self._writer.send(message)
        else:
            await self._send(message)

    def close(self) -> None:
        """Stop following the request, and forget its statistics."""
        if self._updates is not None:
            self._updates.cancel()
        if self._writer is not None:
            self._engine.output_processor.unfollow(self._engine_id)
            self._take_statistics(self._engine_id)

    def _body(self, raw: bytes) -> bytes:
        """Return the body for vLLM; an empty one, which it refuses at once, for a wrong field."""
        if _QUOTED_FIELD not in raw:
            return raw
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return raw  # vLLM refuses malformed JSON itself.
        if not isinstance(body, dict) or body.get(_FIELD) is None:
            return raw
        try:
            options = parse_options(body.pop(_FIELD))
            _refuse_options_of_the_gateway(options)
            self._move(options, body)
        except RequestError as error:
            self._refusal = error
            return b""
        self._begin(body, options)
        return json.dumps(body).encode()

    def _move(self, options: AparOptions, body: dict[str, Any]) -> None:
        marked = self._engine.input_processor.format
        move_options(
            body, options, frozenset(marked.texts), frozenset(marked.uncounted_ids), self._route
        )

    def _begin(self, body: dict[str, Any], options: AparOptions) -> None:
        """Prepare for the answer, once the body is known to be right."""
        if self._route.form is ResponseForm.RESPONSES:
            # vLLM reads this id from the body only, and numbers its requests to the engine.
            body["request_id"] = self._engine_id.rpartition("_")[0]
        # Of an earlier request with this id, whose client did not ask for them.
        self._take_statistics(self._engine_id)
        tags = None if options.stream is None else StreamTags(self._engine_id)
        writer = _WRITERS.get(self._route.form) or WRITERS[self._route.form]
        self._writer = writer(self._engine_id, self._take_statistics, tags, self._send)
        if tags is not None:
            follower = RequestFollower(keeps_journal=False)
            follower.tags = tags
            self._engine.output_processor.follow(self._engine_id, follower)
            self._updates = asyncio.create_task(self._writer.send_updates())

    def _take_statistics(self, request_id: str) -> Mapping[str, Any] | None:
        record = self._engine.output_processor.records.take(request_id)
        return None if record is None else record.statistics.to_plain()


class _OwnResponseWriter(ResponseWriter):
    """The Responses API of vLLM's own server, which may store responses."""

    def _whole(self, body: bytes) -> bytes:
        return AparWriter._whole(self, body)

    def _add_statistics(self, event: dict[str, Any], statistics: dict[str, Any]) -> None:
        if statistics:
            event["response"]["apar"] = statistics


_WRITERS: Mapping[ResponseForm, type[AparWriter]] = {ResponseForm.RESPONSES: _OwnResponseWriter}


def _forking_engine(scope: Scope) -> Any:
    """Return the engine of vLLM's server; None if its model does not fork."""
    state = getattr(scope.get("app"), "state", None)
    engine = getattr(state, "engine_client", None)
    marked = getattr(getattr(engine, "input_processor", None), "format", None)
    return None if marked is None else engine


def _refuse_options_of_the_gateway(options: AparOptions) -> None:
    for name in _OF_THE_GATEWAY:
        if getattr(options, name) is not None:
            raise RequestError(
                f"`apar.{name}` needs the gateway of `apar serve`: leave it out",
                param=f"apar.{name}",
            )
