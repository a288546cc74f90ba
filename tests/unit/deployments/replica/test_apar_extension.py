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
from deployments.replica.apar_extension import AparExtension, AparOptions, parse_options, translate
from deployments.wire.answer import AnswerStart
from deployments.wire.request import RelayedRequest
from tests.fakes.whole_answer import whole_answer

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
        ({"prompt": [1, FORK, 2]}, "prompt"),
        ({"prompt": [[1], [2, CHILD]]}, "prompt"),
        ({"stop_token_ids": [FORK]}, "stop_token_ids"),
        ({"allowed_token_ids": [1, CHILD]}, "allowed_token_ids"),
        ({"logit_bias": {"7": 100}}, "logit_bias"),
        ({"logit_bias": {" 8 ": -100}}, "logit_bias"),
        ({"logit_bias": {"+7": 100}}, "logit_bias"),
        ({"stop_token_ids": ["7"]}, "stop_token_ids"),
        ({"allowed_token_ids": [7.0]}, "allowed_token_ids"),
        ({"kv_transfer_params": {"prompt_token_ids": [7]}}, "kv_transfer_params"),
        ({"ec_transfer_params": {}}, "ec_transfer_params"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"vllm_xargs": {"apar_enabled": 1}}, "vllm_xargs.apar_enabled"),
        ({"vllm_xargs": {"apar": "x"}}, "vllm_xargs.apar"),
        ({"vllm_xargs": 5, "apar": {}}, "vllm_xargs"),
    ],
)
def test_control_tokens_are_refused_in_every_field(body: dict[str, Any], param: str) -> None:
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


def test_a_prompt_that_reads_like_a_token_id_is_text() -> None:
    assert translate({"prompt": "7"}, CONTROL) is False
    assert translate({"prompt": ["7", "8"]}, CONTROL) is False


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

    answer = await whole_answer(
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
    sent = b"".join(part.body if isinstance(part, AnswerStart) else part for part in parts)
    first, second, done = sent.strip().split(b"\n\n")

    assert first + b"\n\n" == text
    assert json.loads(second.removeprefix(b"data: "))["apar"] == {"threads": 3}
    assert done == b"data: [DONE]"


async def test_an_answer_without_statistics_stays_as_it_is() -> None:
    app = Answering(b"application/json", b'{"id":"x"}')

    answer = await whole_answer(AparExtension(app, CONTROL, lambda _: None), chat_request([]))

    assert answer.body == b'{"id":"x"}'


async def test_a_refused_request_never_reaches_the_engine() -> None:
    app = Answering(b"application/json", b"{}")

    answer = await whole_answer(
        AparExtension(app, CONTROL, lambda _: None), chat_request([], apar={"x": 1})
    )

    assert answer.status == 400
    assert json.loads(answer.body)["error"]["param"] == "apar.x"
    assert app.request_id == ""


async def test_requests_with_the_same_id_get_unique_ones() -> None:
    ids = []
    for headers in ([(b"x-request-id", b"mine")], [(b"x-request-id", b"mine")], []):
        app = Answering(b"application/json", b"{}")
        await whole_answer(AparExtension(app, CONTROL, lambda _: None), chat_request(headers))
        ids.append(app.request_id)

    assert len(set(ids)) == 3
    assert ids[0].startswith("mine-")
    assert ids[1].startswith("mine-")


async def test_an_unsafe_request_id_is_replaced() -> None:
    app = Answering(b"application/json", b"{}")
    await whole_answer(
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


@pytest.mark.parametrize("chat", [True, False])
async def test_updates_without_certain_text_get_a_chunk_of_their_own(
    monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    monkeypatch.setattr(apar_extension, "StreamTags", Tags)
    extension = AparExtension(streamed(chat=chat), CONTROL, lambda _: None)
    request = chat_request([], stream=True, apar={"stream": "threads"})

    parts = [part async for part in call_application(extension, request)]

    sent = b"".join(part.body if isinstance(part, AnswerStart) else part for part in parts)
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

    answer = await whole_answer(AparExtension(app, CONTROL, lambda _: None), request)

    assert (answer.status, app.body) == (400, {})
    assert json.loads(answer.body)["error"]["param"] == "apar"
