"""The `apar` field of requests and responses, around vLLM's HTTP application.

A request may carry `"apar": {"enabled": bool, "max_threads": int}`. It is checked here and
reaches the engine as `vllm_xargs`, vLLM's own way into `SamplingParams.extra_args`. An answer
gets an `apar` object with the request's thread statistics: a whole one beside `usage`, a
stream in its usage chunk. Token ids of control tokens are refused wherever a client can name
them, because only the engine may place them.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from apar_core.errors import RequestError
from deployments.apar_options import fit_replay, parse_options
from deployments.asgi_relay import (
    SERVED_KEY,
    AsgiApp,
    Message,
    Receive,
    Scope,
    Send,
    ServedRequest,
)
from deployments.error_responses import JSON_TYPE, answer_for
from deployments.terms_in_body import write_terms

EXTENDED_PATHS = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}
_INTERNAL_PREFIX = "apar"
_TOKEN_ID_LISTS = ("stop_token_ids", "allowed_token_ids")
# Disaggregated serving is not offered, and its parameters can carry a prompt's token ids.
_REFUSED_FIELDS = ("kv_transfer_params", "ec_transfer_params", "prompt_embeds")
_USAGE_CHUNK = b'"choices":[]'

_NUMBER_LIMIT = 2**63

_PLAIN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")

TakeStatistics = Callable[[str], Mapping[str, Any] | None]


def _token_ids(value: object, *, texts: bool) -> Iterable[int]:
    """All token ids in a value, read as leniently as vLLM reads them.

    With `texts`, a string is a text and no id, as in a list of prompts.
    """
    if isinstance(value, list):
        for item in value:
            yield from _token_ids(item, texts=texts)
    elif isinstance(value, int | float) or (isinstance(value, str) and not texts):
        with suppress(ValueError, OverflowError):
            yield int(value)


def refuse_control_tokens(body: Mapping[str, Any], control_token_ids: frozenset[int]) -> None:
    """Raise RequestError if the request names a control token by its id."""
    for field in _REFUSED_FIELDS:
        if body.get(field) is not None:
            raise RequestError(f"`{field}` is not supported", param=field)
    named = {field: _token_ids(body.get(field), texts=False) for field in _TOKEN_ID_LISTS}
    named["prompt"] = _token_ids(body.get("prompt"), texts=True)
    bias = body.get("logit_bias")
    named["logit_bias"] = _token_ids(list(bias) if isinstance(bias, dict) else None, texts=False)
    for field, ids in named.items():
        if found := control_token_ids.intersection(ids):
            raise RequestError(
                f"`{field}` holds the control token id {min(found)}; only the model may fork",
                param=field,
            )


def refuse_huge_numbers(body: Mapping[str, Any]) -> None:
    """Raise RequestError for an integer that cannot be sent to the engine: 64 bits are all."""
    for field, value in body.items():
        if isinstance(value, int) and abs(value) >= _NUMBER_LIMIT:
            raise RequestError(f"`{field}` is out of range: {value}", param=field)


def translate(body: dict[str, Any], control_token_ids: frozenset[int]) -> bool:
    """Check the request and move its `apar` field to `vllm_xargs`, in place.

    Returns whether anything was changed. Raises RequestError.
    """
    refuse_control_tokens(body, control_token_ids)
    refuse_huge_numbers(body)
    extra = body.get("vllm_xargs")
    if isinstance(extra, dict):
        for key in extra:
            if key.startswith(_INTERNAL_PREFIX):  # vLLM passes these on as they are.
                raise RequestError(
                    f"`vllm_xargs.{key}` is internal; use the field `apar`",
                    param=f"vllm_xargs.{key}",
                )
    if body.get("apar") is None:
        return False
    if extra is not None and not isinstance(extra, dict):
        raise RequestError("`vllm_xargs` must be an object", param="vllm_xargs")
    options = parse_options(body.pop("apar"))
    if options.replay is not None:
        fit_replay(body, options.replay, control_token_ids)
    body["vllm_xargs"] = {**(extra or {}), **options.engine_args()}
    return True


class AparExtension:
    """ASGI middleware: `apar` in, `apar` out, for chat completions and completions."""

    def __init__(
        self, app: AsgiApp, control_token_ids: frozenset[int], take_statistics: TakeStatistics
    ) -> None:
        self._app = app
        self._control_token_ids = control_token_ids
        self._take_statistics = take_statistics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        prefix = EXTENDED_PATHS.get(scope["path"]) if scope["type"] == "http" else None
        if prefix is None:
            await self._app(scope, receive, send)
            return
        raw = await _read_body(receive)
        try:
            raw = self._translated(raw, scope.get(SERVED_KEY))
        except RequestError as error:
            answer = answer_for(error)
            await send(
                {"type": "http.response.start", "status": answer.status, "headers": answer.headers}
            )
            await send({"type": "http.response.body", "body": answer.body})
            return
        base_id = _request_id(scope["headers"])
        served: ServedRequest | None = scope.get(SERVED_KEY)
        if served is not None:
            served.begin(prefix + base_id)
        statistics = _StatisticsWriter(prefix + base_id, self._take_statistics, send)
        try:
            await self._app(
                {**scope, "headers": _with_headers(scope["headers"], base_id, len(raw))},
                _replayed(raw, receive),
                statistics.send,
            )
        finally:
            self._take_statistics(prefix + base_id)

    def _translated(self, raw: bytes, served: ServedRequest | None) -> bytes:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return raw  # vLLM's own answer to malformed JSON is right.
        if not isinstance(body, dict):
            return raw
        changed = translate(body, self._control_token_ids)
        if served is not None:
            changed = write_terms(body, served.terms) or changed
        return json.dumps(body).encode() if changed else raw


class _StatisticsWriter:
    """Adds the `apar` object to the answer that passes through."""

    def __init__(self, request_id: str, take: TakeStatistics, send: Send) -> None:
        self._request_id = request_id
        self._take = take
        self._send = send
        self._held_start: Message | None = None
        self._streaming = False

    async def send(self, message: Message) -> None:
        """Pass the message on, with statistics where they belong."""
        if message["type"] == "http.response.start":
            self._streaming = message["status"] != 200 or JSON_TYPE not in message["headers"]
            if self._streaming:
                await self._send(message)
            else:
                self._held_start = message  # Its content-length is about to change.
            return
        body: bytes = message.get("body", b"")
        if self._held_start is not None:
            body = self._extended(body, b"}")
            start = {**self._held_start, "headers": _with_length(self._held_start, len(body))}
            self._held_start = None
            await self._send(start)
        elif self._streaming and _USAGE_CHUNK in body:
            body = self._extended(body, b"}\n\n")
        await self._send({**message, "body": body})

    def _extended(self, body: bytes, end: bytes) -> bytes:
        values = self._take(self._request_id) if body.endswith(end) else None
        if values is None:
            return body
        return body.removesuffix(end) + b',"apar":' + json.dumps(dict(values)).encode() + end


async def _read_body(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return b"".join(pieces)


def _replayed(body: bytes, receive: Receive) -> Receive:
    unread = [body]

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return replay


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The caller's request id, made unique: two requests may carry the same one."""
    unique = uuid.uuid4().hex
    for name, value in headers:
        if name == b"x-request-id" and _PLAIN_ID.fullmatch(value):
            # Not to be taken for the number of a prompt or of a beam, which vLLM appends.
            return f"{value.decode()}-r{unique[:8]}"
    return unique


def _with_headers(
    headers: Iterable[tuple[bytes, bytes]], request_id: str, length: int
) -> list[tuple[bytes, bytes]]:
    kept = [item for item in headers if item[0] not in (b"x-request-id", b"content-length")]
    return [
        *kept,
        (b"x-request-id", request_id.encode()),
        (b"content-length", str(length).encode()),
    ]


def _with_length(start: Message, length: int) -> list[tuple[bytes, bytes]]:
    kept = [item for item in start["headers"] if item[0] != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]
