"""The `apar` field of requests and answers."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from apar_core.engine.thread_tags import StreamTags
from apar_core.errors import RequestError
from deployments.replica import apar_extension
from deployments.replica.answering import call_application
from deployments.replica.apar_extension import (
    AparExtension,
    AparOptions,
    Parsers,
    parse_options,
    translate,
)
from deployments.wire.request import RelayedRequest
from deployments.wire.response import ResponseStart
from tests.fakes.whole_response import whole_response

FORK, CHILD = 7, 8
CONTROL = frozenset({FORK, CHILD})


def test_options_become_numbers() -> None:
    assert parse_options({"enabled": True, "max_threads": 3}).engine_args() == {
        "apar_enabled": 1,
        "apar_max_threads": 3,
    }
    assert parse_options({"enabled": False}).engine_args() == {"apar_enabled": 0}
    # Options that a client omits are left to the engine.
    assert parse_options({}) == AparOptions(enabled=None, max_threads=None)
    assert parse_options({"max_threads": 3}).engine_args() == {"apar_max_threads": 3}


@pytest.mark.parametrize("value", [False, 0, [], ""])
def test_an_empty_value_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(RequestError, match="must be an object"):
        translate({"apar": value}, CONTROL)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (True, "apar"),
        ([], "apar"),
        ({"enable": True}, "apar.enable"),
        ({"enabled": "yes"}, "apar.enabled"),
        ({"enabled": 1}, "apar.enabled"),
        ({"max_threads": 0}, "apar.max_threads"),
        ({"max_threads": -1}, "apar.max_threads"),
        ({"max_threads": 2.5}, "apar.max_threads"),
        ({"max_threads": True}, "apar.max_threads"),
    ],
)
def test_invalid_options_are_named(value: object, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_options(value)

    assert raised.value.param == param
    assert param in str(raised.value)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"tools": 5}, "tools"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"kv_transfer_params": {"prompt_token_ids": [7]}}, "kv_transfer_params"),
        ({"ec_transfer_params": {}}, "ec_transfer_params"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"vllm_xargs": {"apar_enabled": 1}}, "vllm_xargs.apar_enabled"),
        ({"vllm_xargs": {"apar": "x"}}, "vllm_xargs.apar"),
        ({"vllm_xargs": 5, "apar": {}}, "vllm_xargs"),
    ],
)
def test_fields_that_are_not_supported_or_of_a_wrong_type_are_refused(
    body: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as raised:
        translate(body, CONTROL)

    assert raised.value.param == param


@pytest.mark.parametrize("value", [2**63, -(10**30)])
def test_a_number_beyond_64_bits_is_refused(value: int) -> None:
    with pytest.raises(RequestError, match="`top_k` is out of range"):
        translate({"top_k": value}, CONTROL)

    assert not translate({"seed": 2**63 - 1}, CONTROL)


def test_other_fields_pass_unchanged() -> None:
    body = {
        "prompt": [1, 2],
        "stop": ["7"],
        "suffix": "8",
        "logit_bias": {"3": 1.0},
        "vllm_xargs": {"mine": 1},
        "apar": None,
    }
    before = json.dumps(body)

    assert translate(body, CONTROL) is False
    assert json.dumps(body) == before


def test_the_options_are_added_to_the_clients_vllm_xargs() -> None:
    body: dict[str, Any] = {"apar": {"max_threads": 2}, "vllm_xargs": {"mine": 1}}

    assert translate(body, CONTROL) is True
    assert body == {"vllm_xargs": {"mine": 1, "apar_max_threads": 2}}


class Answering:
    """An application that answers with fixed pieces and records the request."""

    def __init__(self, content_type: bytes, *pieces: bytes) -> None:
        self._content_type = content_type
        self._pieces = pieces
        self.body: dict[str, Any] = {}
        self.request_id = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        raw = (await receive())["body"]
        assert int(headers[b"content-length"]) == len(raw)
        self.body = json.loads(raw)
        self.request_id = headers[b"x-request-id"].decode()
        length = str(sum(map(len, self._pieces))).encode()
        kept = [(b"content-type", self._content_type), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": kept})
        for index, piece in enumerate(self._pieces):
            more = index < len(self._pieces) - 1
            await send({"type": "http.response.body", "body": piece, "more_body": more})


def chat_request(headers: list[tuple[bytes, bytes]], **body: object) -> RelayedRequest:
    return RelayedRequest("POST", "/v1/chat/completions", b"", headers, json.dumps(body).encode())


async def test_a_whole_answer_gets_the_statistics_of_its_request() -> None:
    app = Answering(b"application/json", b'{"id":"x","usage":{}}')
    asked: list[str] = []

    def take(request_id: str) -> dict[str, int] | None:
        asked.append(request_id)
        return {"threads": 3} if len(asked) == 1 else None

    answer = await whole_response(
        AparExtension(app, CONTROL, take), chat_request([], apar={"enabled": False})
    )

    assert json.loads(answer.body) == {"id": "x", "usage": {}, "apar": {"threads": 3}}
    assert dict(answer.headers)[b"content-length"] == str(len(answer.body)).encode()
    assert app.body == {"vllm_xargs": {"apar_enabled": 0}}
    assert set(asked) == {f"chatcmpl-{app.request_id}"}


async def test_a_stream_gets_the_statistics_in_its_usage_chunk_only() -> None:
    text = b'data: {"choices":[{"delta":{"content":"\\"choices\\":[]"}}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"total_tokens":3}}\n\n'
    app = Answering(b"text/event-stream", text, usage, b"data: [DONE]\n\n")
    extension = AparExtension(app, CONTROL, lambda request_id: {"threads": 3})

    parts = [part async for part in call_application(extension, chat_request([]))]
    sent = b"".join(part.body if isinstance(part, ResponseStart) else part for part in parts)
    first, second, done = sent.strip().split(b"\n\n")

    assert first + b"\n\n" == text
    assert json.loads(second.removeprefix(b"data: "))["apar"] == {"threads": 3}
    assert done == b"data: [DONE]"


async def test_an_answer_without_statistics_stays_as_it_is() -> None:
    app = Answering(b"application/json", b'{"id":"x"}')

    answer = await whole_response(AparExtension(app, CONTROL, lambda _: None), chat_request([]))

    assert answer.body == b'{"id":"x"}'


async def test_a_refused_request_never_reaches_the_engine() -> None:
    app = Answering(b"application/json", b"{}")

    answer = await whole_response(
        AparExtension(app, CONTROL, lambda _: None), chat_request([], apar={"x": 1})
    )

    assert answer.status == 400
    assert json.loads(answer.body)["error"]["param"] == "apar.x"
    assert app.request_id == ""


async def test_requests_with_the_same_id_get_unique_ones() -> None:
    ids = []
    for headers in ([(b"x-request-id", b"mine")], [(b"x-request-id", b"mine")], []):
        app = Answering(b"application/json", b"{}")
        await whole_response(AparExtension(app, CONTROL, lambda _: None), chat_request(headers))
        ids.append(app.request_id)

    assert len(set(ids)) == 3
    assert ids[0].startswith("mine-")
    assert ids[1].startswith("mine-")


async def test_an_unsafe_request_id_is_replaced() -> None:
    app = Answering(b"application/json", b"{}")
    await whole_response(
        AparExtension(app, CONTROL, lambda _: None),
        chat_request([(b"x-request-id", b"a b\r\n" * 100)]),
    )

    assert len(app.request_id) == 32


# ---- thread-tagged streams ----------------------------------------------------------------------


def streamed(*, chat: bool) -> Any:
    """Return an application that streams two chunks; between them, and at its end, time passes."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kept = [(b"content-type", b"text/event-stream")]
        head = {"id": "x", "object": "o", "created": 1, "model": "m"}
        await send({"type": "http.response.start", "status": 200, "headers": kept})
        for text in ("first", "last"):
            choice = {"delta": {"content": text}} if chat else {"text": text}
            chunk = json.dumps(head | {"choices": [{"index": 0, **choice}]})
            body = f"data: {chunk}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return app


class Tags(StreamTags):
    """Announces two updates, the first of which goes with vLLM's first chunk."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.left = ["a", "b"]
        self.announce()

    def take(self) -> dict[str, Any]:
        texts, self.left = self.left[:1], self.left[1:]
        if self.left:
            self.announce()
        return {"time_ms": 1, "updates": [{"choice": 2, "text": text} for text in texts]}


@pytest.mark.usefixtures("simulated_time")
@pytest.mark.parametrize("chat", [True, False])
async def test_updates_without_certain_text_get_a_chunk_of_their_own(
    monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    monkeypatch.setattr(apar_extension, "StreamTags", Tags)
    extension = AparExtension(streamed(chat=chat), CONTROL, lambda _: None)
    request = chat_request([], stream=True, apar={"stream": "threads"})

    parts = [part async for part in call_application(extension, request)]

    sent = b"".join(part.body if isinstance(part, ResponseStart) else part for part in parts)
    *chunks, done = (event.removeprefix(b"data: ") for event in sent.strip().split(b"\n\n"))
    first, second, last = map(json.loads, chunks)
    assert done == b"[DONE]"
    assert [[each["text"] for each in c["apar"]["updates"]] for c in (first, second, last)] == [
        ["a"],
        ["b"],
        [],
    ]
    empty = {"delta": {"content": ""}} if chat else {"text": ""}
    assert second["choices"] == [{"index": 2, **empty, "logprobs": None, "finish_reason": None}]
    assert {name: second[name] for name in ("id", "object", "created", "model")} == {
        "id": "x",
        "object": "o",
        "created": 1,
        "model": "m",
    }


@pytest.mark.parametrize(
    "body",
    [
        {"apar": {"stream": "threads"}},
        {"apar": {"stream": "threads"}, "stream": False},
        {"apar": {"stream": "tokens"}, "stream": True},
        {"apar": {"stream": "threads"}, "stream": True, "use_beam_search": True},
    ],
)
async def test_a_stream_that_cannot_be_tagged_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        translate(body, CONTROL)

    assert refused.value.param == "apar.stream"


async def test_embeddings_have_no_field_apar() -> None:
    app = Answering(b"application/json", b"{}")
    request = replace(chat_request([], apar={"stream": "threads"}), path="/v1/embeddings")

    answer = await whole_response(AparExtension(app, CONTROL, lambda _: None), request)

    assert (answer.status, app.body) == (400, {})
    assert json.loads(answer.body)["error"]["param"] == "apar"


RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


RESPONSE = {"id": "resp_1", "status": "incomplete", "output": []}
PLACE = {"item_id": "i", "output_index": 0, "content_index": 0}
RESPONSE_EVENTS = [
    event("response.created", response={"id": "resp_1"}, sequence_number=0),
    event("response.content_part.added", **PLACE, sequence_number=1),
    event("response.output_text.delta", **PLACE, delta="a", sequence_number=2),
    event("response.output_text.done", **PLACE, text="a", sequence_number=3),
    event("response.completed", response=RESPONSE, sequence_number=4),
]
MESSAGE_EVENTS = [
    event("message_start", message={"id": "m"}),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}),
    event("content_block_stop", index=0),
    event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 1}),
    event("message_stop"),
]
STREAMS = {RESPONSES: RESPONSE_EVENTS, MESSAGES: MESSAGE_EVENTS}


async def named_stream(path: str, **body: object) -> tuple[list[dict[str, Any]], Answering]:
    """Return the events of a stream, whose request has two threads, and the application."""
    app = Answering(b"text/event-stream", *STREAMS[path])
    extension = AparExtension(app, CONTROL, lambda request_id: {"threads": 2})
    request = RelayedRequest("POST", path, b"", [], json.dumps(body).encode())
    parts = [part async for part in call_application(extension, request)]
    sent = b"".join(part.body if isinstance(part, ResponseStart) else part for part in parts)
    events = [each.partition(b"\ndata: ") for each in sent.split(b"\n\n")[:-1]]
    found = [json.loads(data) for _, _, data in events]
    assert [name for name, _, _ in events] == [b"event: " + each["type"].encode() for each in found]
    return found, app


async def test_a_stream_of_the_responses_api_has_statistics_in_its_last_response() -> None:
    *first, last = (await named_stream(RESPONSES, input="x"))[0]

    assert last["type"] == "response.incomplete"
    assert last["response"] == RESPONSE | {"apar": {"threads": 2}, "store": False}
    assert all("apar" not in each for each in first)


async def test_the_engine_and_the_client_know_a_response_by_one_id() -> None:
    _, app = await named_stream(RESPONSES, input="x")

    assert app.body["request_id"] == f"resp_{app.request_id}"


async def test_a_stream_of_messages_has_statistics_beside_its_usage() -> None:
    events, _ = await named_stream(MESSAGES, messages=[])

    assert [each["type"] for each in events if "apar" in each] == ["message_delta"]
    assert events[-2]["apar"] == {"threads": 2}


@pytest.mark.parametrize("path", STREAMS)
async def test_tagged_streams_of_named_events_carry_updates_with_deltas_and_at_the_end(
    path: str,
) -> None:
    events, _ = await named_stream(path, stream=True, apar={"stream": "threads"})

    carrying = [each["type"] for each in events if "updates" in each.get("apar", {})]
    assert (
        carrying
        == {
            RESPONSES: ["response.output_text.delta", "response.incomplete"],
            MESSAGES: ["content_block_delta", "message_delta"],
        }[path]
    )
    if path == RESPONSES:
        assert [each["sequence_number"] for each in events] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"request_id": "mine"}, "request_id"),
        ({"apar": {"x": 1}}, "apar.x"),
    ],
)
async def test_a_response_that_would_be_stored_or_could_place_a_fork_is_refused(
    fields: dict[str, Any], param: str
) -> None:
    app = Answering(b"application/json", b"{}")
    request = RelayedRequest("POST", RESPONSES, b"", [], json.dumps(fields).encode())

    answer = await whole_response(AparExtension(app, CONTROL, lambda _: None), request)

    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, param)
    assert not app.request_id


async def test_an_error_of_messages_has_anthropics_form() -> None:
    app = Answering(b"application/json", b"{}")
    body = json.dumps({"apar": {"x": 1}}).encode()
    request = RelayedRequest("POST", MESSAGES, b"", [], body)

    answer = await whole_response(AparExtension(app, CONTROL, lambda _: None), request)

    error = json.loads(answer.body)
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["param"] == "apar.x"


@pytest.mark.parametrize(
    ("content", "joined"),
    [
        ([{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}], "ab"),
        ([], ""),
        ("c", "c"),
        ([{"text": 5}], [{"text": 5}]),
        ([1], [1]),
    ],
)
async def test_all_parts_of_an_assistants_message_are_read(content: Any, joined: Any) -> None:
    item = {"type": "message", "role": "assistant", "content": content}

    _, app = await named_stream(RESPONSES, input=[item, 7, {"role": "user", "content": []}])

    assert app.body["input"] == [item | {"content": joined}, 7, {"role": "user", "content": []}]


OUTPUTS = [{"type": "input_text", "text": "a"}]


@pytest.mark.parametrize(
    ("item", "is_kept"),
    [
        ({"role": "assistant", "content": "a"}, False),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, True),
        ({"type": "function_call_output", "call_id": "c", "output": OUTPUTS}, False),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": OUTPUTS}, False),
        ({"type": "function_call_output", "call_id": "c", "output": "a"}, True),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, True),
    ],
)
async def test_items_that_vllm_would_take_for_its_own_lose_their_ids(
    item: dict[str, Any], is_kept: bool
) -> None:
    own = {"status": "completed", "created_by": None}

    _, app = await named_stream(RESPONSES, input=[item | own | {"id": "i"}, item | {"id": 5}])

    assert app.body["input"] == [item | own | ({"id": "i"} if is_kept else {}), item | {"id": 5}]


TOOLS = {"tools": [{"type": "function", "name": "f"}]}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *((path, TOOLS, "tools") for path in ("/v1/chat/completions", RESPONSES, MESSAGES)),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (RESPONSES, {"thinking_token_budget": 1}, "thinking_token_budget"),
    ],
)
async def test_tools_and_thoughts_need_a_parser(
    path: str, fields: dict[str, Any], param: str
) -> None:
    refused = {}
    for parsers in (Parsers(), Parsers(tools=False, reasoning=False)):
        app = Answering(b"application/json", b"{}")
        extension = AparExtension(app, CONTROL, lambda _: None, parsers=parsers)
        request = RelayedRequest("POST", path, b"", [], json.dumps(fields).encode())
        refused[parsers] = await whole_response(extension, request)

    with_parser, without = refused.values()
    assert (with_parser.status, without.status) == (200, 400)
    error = json.loads(without.body)["error"]
    assert error["param"] == param
    assert "engine: {" in error["message"]


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
def test_tools_that_may_not_be_called_need_no_parser(choice: object) -> None:
    body = TOOLS | {"tool_choice": choice}

    assert not translate(body, CONTROL, parsers=Parsers(tools=False))


@pytest.mark.parametrize("fields", [{"best_of": 1}, {"best_of": 3, "n": 3}, {"store": False}])
def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert not translate(fields, CONTROL)


@pytest.mark.parametrize("field", ["messages", "best_of", "metadata"])
async def test_no_depth_of_nesting_is_a_fault_of_the_server(field: str) -> None:
    async def accept(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    extension = AparExtension(accept, CONTROL, lambda _: None)

    for depth in range(900, 1000):
        value = '{"a": ' + "[" * depth + "]" * depth + "}"
        body = f'{{"n": null, "{field}": {value}}}'.encode()
        request = RelayedRequest("POST", "/v1/chat/completions", b"", [], body)
        assert (await whole_response(extension, request)).status in (200, 400)


async def test_a_null_never_reaches_vllm() -> None:
    app = Answering(b"application/json", b"{}")
    extension = AparExtension(app, CONTROL, lambda _: None)

    await whole_response(extension, chat_request([], n=None, seed=1, max_tokens=None))

    assert app.body == {"seed": 1, "max_tokens": None}


@pytest.mark.parametrize(
    "item", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}, {"id": "m", "type": None}]
)
async def test_a_reference_to_a_stored_item_is_refused(item: dict[str, Any]) -> None:
    app = Answering(b"application/json", b"{}")
    extension = AparExtension(app, CONTROL, lambda _: None)
    body = json.dumps({"input": [{"role": "user", "content": "x"}, item]}).encode()

    answer = await whole_response(extension, RelayedRequest("POST", RESPONSES, b"", [], body))

    assert answer.status == 400
    assert "`input[1]` refers to a stored item" in json.loads(answer.body)["error"]["message"]
