"""The `apar` field of requests and responses: ASGI middleware around vLLM's application.

A request may contain `"apar": {"enabled": bool, "max_threads": int}`. It is checked here and
reaches the engine as `vllm_xargs`, which vLLM copies to `SamplingParams.extra_args`. The answer
gets an `apar` object with the request's thread statistics, next to `usage` or, in a stream, in the
usage chunk. With `"stream": "threads"`, every chunk gets one that says what each thread wrote.

A response of the Responses API has the object in itself, also at the end of a stream; a stream of
Anthropic's messages has it in `message_delta`, beside `usage`. What threads wrote travels with
deltas and with that last event.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apar_core.engine.replay import PARAM, REPLAY_REQUEST_ARG
from apar_core.engine.thread_tags import StreamTags
from apar_core.errors import RequestError
from deployments.wire.errors import ERROR_EVENTS, JSON_TYPE, named_event, response_for
from deployments.wire.request import (
    MAX_DEADLINE_MS,
    MAX_EXPECTED_TOKENS,
    PARENT_ID_PATTERN,
    SCOPE_KEY,
    RequestTerms,
    write_terms,
)
from deployments.wire.routes import OPENAI_SHAPE, ROUTES, ResponseForm, Route

if TYPE_CHECKING:
    from deployments.replica.answering import FollowedRequest

MAX_REPLAY_TOKENS = 2**17
MAX_REPLAY_THREADS = 2**12
_INTERNAL_PREFIX = "apar"
# Disaggregated serving is not supported, and its parameters may contain a prompt's token ids.
REFUSED_FIELDS = ("kv_transfer_params", "ec_transfer_params", "prompt_embeds")
# A null is as if the field were absent; in completions, vLLM knows `max_tokens: null` as no limit.
_NULLABLE_FIELD = "max_tokens"
_UNUSED_FIELDS: Mapping[str, str] = {
    "functions": "send `tools`",
    "function_call": "send `tool_choice`",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        'send `"structured_outputs": {"json", "regex", "choice" or "grammar": ...}`',
    ),
    **dict.fromkeys(
        ("guided_decoding_backend", "guided_whitespace_pattern"),
        "the server's configuration sets it (`engine: {structured_outputs_config: ...}`)",
    ),
}
# vLLM reads these before it checks their types.
_FIELD_TYPES: Mapping[str, tuple[type, str]] = {
    "messages": (list, "a list of messages"),
    "tools": (list, "a list of tools"),
    "structured_outputs": (dict, "an object"),
}
_USAGE_CHUNK = b'"choices":[]'
_CHUNK, _CHUNK_END = b"data: {", b"}\n\n"
_NAMED = b"event: "
# Deltas of Anthropic's content blocks; there are also signatures.
_TEXTS = ("text_delta", "thinking_delta", "input_json_delta")
_ID = {"id", "type"}
_TOOL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_NUMBER_LIMIT = 2**63
_PLAIN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Parsers:
    """Which parsers a model's answers have: for calls of tools, and for thoughts."""

    tools: bool = True
    reasoning: bool = True


TakeStatistics = Callable[[str], Mapping[str, Any] | None]
"""Returns and forgets the thread statistics of a request; None if there are none."""


def _bounded(scripts: dict[str, list[int]]) -> dict[str, list[int]]:
    num_tokens = sum(map(len, scripts.values()))
    if num_tokens > MAX_REPLAY_TOKENS or len(scripts) > MAX_REPLAY_THREADS:
        raise ValueError(
            f"{num_tokens} tokens in {len(scripts)} threads are too many: at most "
            f"{MAX_REPLAY_TOKENS} in {MAX_REPLAY_THREADS}"
        )
    return scripts


class AparOptions(BaseModel):
    """Fork options of a request."""

    # Only the form of `replay` is checked here; the engine's input processor knows the vocabulary.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    enabled: bool | None = Field(None, description="Whether the request may fork.")
    max_threads: PositiveInt | None = Field(None, description="Threads alive at once.")
    stream: Literal["threads"] | None = Field(
        None, description="`threads`: each chunk of the stream says what each thread wrote."
    )
    # The gateway has checked these and acts on them: see `deployments/gateway/request_options.py`.
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = Field(
        None, description="Time until the answer must end (milliseconds from the arrival)."
    )
    first_token_deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = Field(
        None, description="Time until the first token must be there (milliseconds)."
    )
    expected_tokens: Annotated[int, Field(ge=1, le=MAX_EXPECTED_TOKENS)] | None = Field(
        None, description="Length of the answer that the client expects, for the router."
    )
    parent_request_id: Annotated[str, Field(pattern=PARENT_ID_PATTERN)] | None = Field(
        None, description="What the request is a part of, for the router."
    )
    replay: Annotated[dict[str, list[int]], AfterValidator(_bounded)] | None = Field(
        None,
        description="Token ids that each thread is to generate, by thread path; only if the "
        "server's configuration allows it.",
    )

    def engine_args(self) -> dict[str, int | str]:
        """Return the internal keys of `SamplingParams.extra_args`, whose values must be flat.

        Options that the client omits are left to the engine's defaults.
        """
        given = {"apar_enabled": self.enabled, "apar_max_threads": self.max_threads}
        args: dict[str, int | str] = {
            name: int(value) for name, value in given.items() if value is not None
        }
        if self.replay is not None:
            args[REPLAY_REQUEST_ARG] = json.dumps(self.replay, separators=(",", ":"))
        return args


def parse_options(value: object) -> AparOptions:
    """Validate the `apar` field; raises RequestError that names the invalid key."""
    if not isinstance(value, dict):
        raise RequestError("`apar` must be an object", param="apar")
    try:
        return AparOptions.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(["apar", *(str(part) for part in problem["loc"])])
        if problem["type"] == "extra_forbidden":
            known = ", ".join(AparOptions.model_fields)
            raise RequestError(f"Unknown key `{name}`; known: {known}", param=name) from error
        raise RequestError(f"`{name}`: {problem['msg']}", param=name) from error


def fit_replay(
    body: dict[str, Any],
    scripts: Mapping[str, list[int]],
    control_token_ids: frozenset[int],
    uncounted_token_ids: frozenset[int],
    limits: Sequence[str] = OPENAI_SHAPE.limits,
) -> None:
    """Set the last of the `limits` to the length of the replay, unless the client has set one.

    Raises RequestError for a beam search, which needs a choice among several tokens.
    """
    if body.get("use_beam_search"):
        raise RequestError(f"`{PARAM}` is impossible in a beam search", param=PARAM)
    if all(body.get(name) is None for name in limits):
        text_ids = [
            token_id
            for token_ids in scripts.values()
            for token_id in token_ids
            if token_id not in uncounted_token_ids
        ]
        # The model's end tokens do not count as text. One is added so that the last thread reaches
        # its own. A thread may also end with a marker of its format, which is text.
        num_ended = sum(not ids or ids[-1] not in control_token_ids for ids in scripts.values())
        body[limits[-1]] = max(1, len(text_ids) - num_ended + 1)


def check_stream(body: Mapping[str, Any], options: AparOptions) -> None:
    """Raise RequestError if the request cannot have the thread-tagged stream that it asks for."""
    if options.stream is None:
        return
    if body.get("stream") is not True:
        raise RequestError('`apar.stream` needs `"stream": true`', param="apar.stream")
    if body.get("use_beam_search"):
        raise RequestError("`apar.stream` is impossible in a beam search", param="apar.stream")


def check_fields(body: Mapping[str, Any]) -> None:
    """Raise RequestError for a field that is not supported, or of a type that vLLM fails on."""
    for field in REFUSED_FIELDS:
        if body.get(field) is not None:
            raise RequestError(f"`{field}` is not supported", param=field)
    for field, (kind, name) in _FIELD_TYPES.items():
        value = body.get(field)
        if value is not None and not isinstance(value, kind):
            raise RequestError(
                f"`{field}` must be {name}, got {json.dumps(value)[:40]}", param=field
            )


def check_unused_fields(body: Mapping[str, Any]) -> None:
    """Raise RequestError for a field that vLLM accepts and does not act on."""
    for field, remedy in _UNUSED_FIELDS.items():
        if body.get(field) is not None:
            raise RequestError(f"`{field}` is not supported: {remedy}", param=field)
    best_of = body.get("best_of")
    if best_of not in (None, 1, body.get("n")):
        raise RequestError(
            f"`best_of` is not supported: it must be absent or equal `n`, got {best_of!s:.40}",
            param="best_of",
        )


def check_parsers(body: Mapping[str, Any], parsers: Parsers, form: ResponseForm) -> None:
    """Raise RequestError for tools or thoughts that the model has no parser for."""
    choice = body.get("tool_choice")
    choice = choice.get("type") if isinstance(choice, dict) else choice
    if body.get("tools") and choice != "none" and not parsers.tools:
        unless = {"type": "none"} if form is ResponseForm.MESSAGES else "none"
        raise RequestError(
            "`tools` need a parser of the model's tool calls, which this model is configured "
            "without. Set `engine: {tool_call_parser: NAME}` of the model in the server's "
            f'configuration, or send `"tool_choice": {json.dumps(unless)}`.',
            param="tools",
        )
    thinking = body.get("thinking") if form is ResponseForm.MESSAGES else None
    budget = isinstance(thinking, dict) and thinking.get("type") == "enabled"
    for field, asked in {
        "thinking": budget,
        "thinking_token_budget": body.get("thinking_token_budget") is not None,
    }.items():
        if asked and not parsers.reasoning:
            raise RequestError(
                f"`{field}` needs a parser of the model's thoughts, which this model is configured "
                "without. Set `engine: {reasoning_parser: NAME}` of the model in the server's "
                f"configuration, or leave `{field}` out.",
                param=field,
            )


def refuse_huge_numbers(body: Mapping[str, Any]) -> None:
    """Raise RequestError for an integer that does not fit into 64 bits."""
    for field, value in body.items():
        if isinstance(value, int) and abs(value) >= _NUMBER_LIMIT:
            raise RequestError(f"`{field}` is out of range: {value}", param=field)


def simplify_items(items: object) -> None:
    """Rewrite the items of a response's input that vLLM 0.32 misreads, in place.

    vLLM reads only the first part of an assistant's message, and fails if there is none, so the
    parts are joined to one string. An `id` makes vLLM parse such a message, and a tool's output in
    parts, as a type that it then refuses or fails on. It has no other effect and is removed. Raises
    RequestError for a reference to a stored item.
    """
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, dict):
            continue
        if item.get("type") == "item_reference" or (item.get("type") is None and set(item) <= _ID):
            raise RequestError(
                f"`input[{index}]` refers to a stored item, but responses are not stored: send the "
                "item itself",
                param="input",
            )
        if item.get("role") == "assistant":
            parts = item.get("content")
            if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
                texts = [part.get("text", part.get("refusal", "")) for part in parts]
                if all(isinstance(text, str) for text in texts):
                    item["content"] = "".join(texts)
            is_misread = isinstance(item.get("content"), str)
        else:
            is_tool_output = item.get("type") in _TOOL_OUTPUTS
            is_misread = is_tool_output and isinstance(item.get("output"), list)
        if is_misread and isinstance(item.get("id"), str):
            del item["id"]


def translate(
    body: dict[str, Any],
    control_token_ids: frozenset[int],
    uncounted_token_ids: frozenset[int] | None = None,
    route: Route = ROUTES["/v1/completions"],
    parsers: Parsers = Parsers(),
) -> bool:
    """Check the request and move its `apar` field to `vllm_xargs`, in place.

    `uncounted_token_ids` are the control tokens that are not text where a thread generates them; by
    default, all. Returns whether anything changed; raises RequestError.
    """
    for field, reason in route.refused.items():
        if body.get(field):
            raise RequestError(f"`{field}` is not supported: {reason}", param=field)
    check_fields(body)
    check_unused_fields(body)
    check_parsers(body, parsers, route.form)
    refuse_huge_numbers(body)
    extra = body.get("vllm_xargs")
    if isinstance(extra, dict):
        for key in extra:
            if key.startswith(_INTERNAL_PREFIX):  # vLLM would pass them on unchecked.
                raise RequestError(
                    f"`vllm_xargs.{key}` is internal; use the field `apar`",
                    param=f"vllm_xargs.{key}",
                )
    if body.get("apar") is None:
        return False
    uncounted = control_token_ids if uncounted_token_ids is None else uncounted_token_ids
    move_options(body, parse_options(body.pop("apar")), control_token_ids, uncounted, route)
    return True


def move_options(
    body: dict[str, Any],
    options: AparOptions,
    control_token_ids: frozenset[int],
    uncounted_token_ids: frozenset[int],
    route: Route,
) -> None:
    """Write the options of a request to its `vllm_xargs`; ids are as in `translate`."""
    extra = body.get("vllm_xargs")
    if extra is not None and not isinstance(extra, dict):
        raise RequestError("`vllm_xargs` must be an object", param="vllm_xargs")
    check_stream(body, options)
    if options.replay is not None:
        fit_replay(body, options.replay, control_token_ids, uncounted_token_ids, route.shape.limits)
    body["vllm_xargs"] = {**(extra or {}), **options.engine_args()}


class AparExtension:
    """ASGI middleware for the `apar` field of all routes that generate text."""

    def __init__(
        self,
        app: ASGIApp,
        control_token_ids: frozenset[int],
        take_statistics: TakeStatistics,
        uncounted_token_ids: frozenset[int] | None = None,
        parsers: Parsers = Parsers(),
    ) -> None:
        """Extend an application; ids are as in `translate`."""
        self._app = app
        self._parsers = parsers
        self._control_token_ids = control_token_ids
        self._uncounted_token_ids = uncounted_token_ids
        self._take_statistics = take_statistics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        route = ROUTES.get(scope["path"]) if scope["type"] == "http" else None
        followed: FollowedRequest | None = scope.get(SCOPE_KEY)
        if route is None or route.engine_id is None:
            if followed is not None and followed.terms.model is not None:
                receive = _replayed(_renamed(await _read_body(receive), followed.terms), receive)
            await self._app(scope, receive, send)
            return
        base_id = _request_id(scope["headers"])
        engine_id = route.engine_id.format(base_id)
        raw = await _read_body(receive)
        try:
            raw, tagged = self._translated(raw, followed, route, engine_id)
        except (RequestError, RecursionError) as error:
            if isinstance(error, RecursionError):
                error = RequestError("The body is nested too deeply.")
            answer = response_for(error).in_form(route.form)
            await send(
                {"type": "http.response.start", "status": answer.status, "headers": answer.headers}
            )
            await send({"type": "http.response.body", "body": answer.body})
            return
        tags = StreamTags(engine_id) if tagged else None
        if followed is not None:
            if tags is not None:
                followed.follower.tags = tags
            followed.begin(engine_id)
        writer = WRITERS[route.form](engine_id, self._take_statistics, tags, send)
        updates = asyncio.create_task(writer.send_updates()) if tagged else None
        try:
            await self._app(
                {**scope, "headers": _with_headers(scope["headers"], base_id, len(raw))},
                _replayed(raw, receive),
                writer.send,
            )
        finally:
            if updates is not None:
                updates.cancel()
            self._take_statistics(engine_id)

    def _translated(
        self, raw: bytes, followed: FollowedRequest | None, route: Route, engine_id: str
    ) -> tuple[bytes, bool]:
        """Return the body for vLLM, and whether the client wants a thread-tagged stream."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return raw, False  # vLLM refuses malformed JSON itself.
        if not isinstance(body, dict):
            return raw, False
        given = body.get("apar")
        if given is not None and not route.forks:
            raise RequestError("`apar` is a field of requests for text only", param="apar")
        nulls = [name for name in body if body[name] is None and name != _NULLABLE_FIELD]
        for name in nulls:
            del body[name]
        changed = route.forks and translate(
            body, self._control_token_ids, self._uncounted_token_ids, route, self._parsers
        )
        tagged = changed and isinstance(given, dict) and given.get("stream") is not None
        changed = changed or bool(nulls)
        if followed is not None:
            changed = write_terms(body, followed.terms) or changed
        if route.form is ResponseForm.RESPONSES:
            # vLLM reads this id from the body only, and numbers its requests to the engine.
            body["request_id"] = engine_id.rpartition("_")[0]
            simplify_items(body.get("input"))
            changed = True
        return json.dumps(body).encode() if changed else raw, tagged


class AparWriter:
    """Adds the `apar` object to an answer on its way to the client: OpenAI's chunks."""

    def __init__(
        self, request_id: str, take: TakeStatistics, tags: StreamTags | None, send: Send
    ) -> None:
        self._request_id = request_id
        self._take = take
        self._tags = tags
        self._send = send
        self._held_start: Message | None = None
        self._streaming = False
        # What the chunks of this stream have in common, once there is one.
        self._head: dict[str, Any] | None = None
        self._text_field: dict[str, Any] = {}

    async def send_updates(self) -> None:
        """Send updates for which vLLM sends no chunk, because no text became certain."""
        while self._tags is not None:
            await self._tags.due()
            if self._head is None:
                continue  # They travel with the first chunk.
            apar = self._tags.take()
            if apar["updates"]:
                choice = {"index": apar["updates"][0]["choice"], **self._text_field}
                choice |= {"logprobs": None, "finish_reason": None}
                body = _CHUNK[:-1] + _json({**self._head, "choices": [choice], "apar": apar})
                message = {"type": "http.response.body", "body": body + b"\n\n", "more_body": True}
                await self._send(message)

    async def send(self, message: Message) -> None:
        """Send the message, with statistics and updates added where they belong."""
        if message["type"] == "http.response.start":
            self._streaming = message["status"] != 200 or JSON_TYPE not in message["headers"]
            if self._streaming:
                await self._send(message)
            else:
                self._held_start = message  # Its content-length is about to change.
            return
        body: bytes = message.get("body", b"")
        if self._held_start is not None:
            body = self._whole(body)
            start = {**self._held_start, "headers": _with_length(self._held_start, len(body))}
            self._held_start = None
            await self._send(start)
        elif self._streaming:
            body = self._streamed(body)
        await self._send({**message, "body": body})

    def _whole(self, body: bytes) -> bytes:
        """Return a whole answer with statistics."""
        return self._extended(body, b"}")

    def _streamed(self, body: bytes) -> bytes:
        """Return a piece of a stream with statistics and updates."""
        if self._tags is not None or _USAGE_CHUNK in body:
            return self._extended(body, _CHUNK_END)
        return body

    def _extended(self, body: bytes, end: bytes) -> bytes:
        if not body.endswith(end):
            return body
        values: dict[str, Any] = {}
        if not self._streaming or _USAGE_CHUNK in body:
            values |= self._take(self._request_id) or {}
        if self._tags is not None and body.startswith(_CHUNK) and not body.startswith(ERROR_EVENTS):
            if self._head is None:
                self._read_head(json.loads(body.removeprefix(_CHUNK[:-1])))
            values |= self._tags.take()
        return body.removesuffix(end) + b',"apar":' + _json(values) + end if values else body

    def _read_head(self, chunk: dict[str, Any]) -> None:
        self._head = {name: chunk[name] for name in ("id", "object", "created", "model")}
        is_chat = "delta" in chunk["choices"][0]
        self._text_field = {"delta": {"content": ""}} if is_chat else {"text": ""}


class _EventWriter(AparWriter):
    """Adds the `apar` object to a stream of named events, which vLLM sends one by one."""

    # Starts of the events that carry statistics.
    _last_starts: ClassVar[tuple[bytes, ...]]

    def __init__(
        self, request_id: str, take: TakeStatistics, tags: StreamTags | None, send: Send
    ) -> None:
        super().__init__(request_id, take, tags, send)
        # An event with the text "" for updates that come without text; None if no part is open.
        self._empty_delta: dict[str, Any] | None = None

    async def send_updates(self) -> None:
        """Send updates for which vLLM sends no event, because no text became certain."""
        while self._tags is not None:
            await self._tags.due()
            if self._empty_delta is None:
                continue  # They travel with the next delta, or with the last event.
            apar = self._tags.take()
            if apar["updates"]:
                body = self._event(self._empty_delta | {"apar": apar})
                await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _streamed(self, body: bytes) -> bytes:
        is_last = body.startswith(self._last_starts)
        if not is_last and (self._tags is None or not body.startswith(_NAMED)):
            return body
        event: dict[str, Any] = json.loads(body.partition(b"\ndata: ")[2])
        self._follow(event)
        values: dict[str, Any] = {}
        if is_last:
            self._add_statistics(event, dict(self._take(self._request_id) or {}))
        if self._tags is not None and (is_last or _adds_text(event)):
            values |= self._tags.take()
        if values:
            event["apar"] = event.get("apar", {}) | values
        return self._event(event)

    def _event(self, event: dict[str, Any]) -> bytes:
        return named_event(event)

    def _follow(self, event: dict[str, Any]) -> None:
        """Note whether a part with text is open."""
        raise NotImplementedError

    def _add_statistics(self, event: dict[str, Any], statistics: dict[str, Any]) -> None:
        raise NotImplementedError


class ResponseWriter(_EventWriter):
    """The Responses API."""

    _last_starts = (b"event: response.completed\n",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._num_events = 0

    def _whole(self, body: bytes) -> bytes:
        body = super()._whole(body)
        return body.removesuffix(b"}") + b',"store":false}' if body.endswith(b"}") else body

    def _event(self, event: dict[str, Any]) -> bytes:
        if self._tags is not None:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return super()._event(event)

    def _follow(self, event: dict[str, Any]) -> None:
        if event["type"] == "response.content_part.added":
            places = ("item_id", "output_index", "content_index")
            self._empty_delta = {
                "type": "response.output_text.delta",
                "sequence_number": 0,
                **{name: event[name] for name in places},
                "delta": "",
                "logprobs": [],
            }
        elif event["type"] == "response.output_text.done":
            self._empty_delta = None

    def _add_statistics(self, event: dict[str, Any], statistics: dict[str, Any]) -> None:
        response = event["response"]
        if statistics:
            response["apar"] = statistics
        response["store"] = False
        if response["status"] == "incomplete":
            event["type"] = "response.incomplete"  # vLLM calls every last event `completed`.


class MessageWriter(_EventWriter):
    """Anthropic's Messages API."""

    _last_starts = (b"event: message_delta\n",)

    def _follow(self, event: dict[str, Any]) -> None:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "text":
            self._empty_delta = {
                "type": "content_block_delta",
                "index": event["index"],
                "delta": {"type": "text_delta", "text": ""},
            }
        elif event["type"] == "content_block_stop":
            self._empty_delta = None

    def _add_statistics(self, event: dict[str, Any], statistics: dict[str, Any]) -> None:
        if statistics:
            event["apar"] = statistics


def _adds_text(event: Mapping[str, Any]) -> bool:
    delta = event.get("delta")
    return isinstance(delta, str) or (isinstance(delta, dict) and delta.get("type") in _TEXTS)


WRITERS: Mapping[ResponseForm, type[AparWriter]] = {
    ResponseForm.CHUNKS: AparWriter,
    ResponseForm.RESPONSES: ResponseWriter,
    ResponseForm.MESSAGES: MessageWriter,
}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


async def _read_body(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return b"".join(pieces)


def _renamed(raw: bytes, terms: RequestTerms) -> bytes:
    """Return a body, of a request that does not reach the engine, with the name of its model."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return raw  # vLLM refuses malformed JSON itself.
    if isinstance(body, dict) and write_terms(body, replace(terms, cache_salt=None)):
        return json.dumps(body).encode()
    return raw


def _replayed(body: bytes, receive: Receive) -> Receive:
    unread = [body]

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return replay


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the caller's request id with a unique suffix: several requests may share one."""
    unique = uuid.uuid4().hex
    for name, value in headers:
        if name == b"x-request-id" and _PLAIN_ID.fullmatch(value):
            # The `r` tells the suffix from the number of a prompt or beam, which vLLM appends.
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
