"""Streams of named events (Responses, Messages) that lose their replica; the replicas are fakes."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deployments.relay.continuation import ContinuationError, client_stream
from deployments.relay.relay import Retries, relay_response
from deployments.wire.errors import ReplicaLostError
from deployments.wire.request import RelayedRequest
from deployments.wire.response import Piece, ResponseEnd, ResponseStart
from deployments.wire.routes import ResponseForm
from tests.fakes.replicas import EVENTS, FakeReplicas
from tests.unit.deployments.relay.test_continuation import Client

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FORMS = {RESPONSES: ResponseForm.RESPONSES, MESSAGES: ResponseForm.MESSAGES}
THOUGHT = ["Let ", "me see."]
TOKENS = ["Grüße", ", ", "\U0001f600", '"id":"x",\n\n', " event: ", "end"]
TEXT = "".join(TOKENS)


def event(kind: str, **fields: Any) -> bytes:
    text = json.dumps({"type": kind, **fields}, ensure_ascii=False)
    return f"event: {kind}\ndata: {text}\n\n".encode()


def response_events(number: int, tokens: list[str]) -> Iterator[bytes]:
    """A replica's stream of the Responses API, with its own ids and times."""
    response = {"id": f"resp_{number}", "created_at": number, "output": [], "status": "in_progress"}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": response}),
        ("response.in_progress", {"response": response}),
    ]
    items = []
    for index, (kind, texts) in enumerate([("reasoning_text", THOUGHT), ("output_text", tokens)]):
        item_id = f"{kind}_{number}"
        place = {"item_id": item_id, "output_index": index, "content_index": 0}
        whole = "".join(texts)
        items.append({"id": item_id, "content": [{"text": whole}]})
        events += [
            ("response.output_item.added", {"output_index": index, "item": {"id": item_id}}),
            ("response.content_part.added", {**place, "part": {"text": ""}}),
            *((f"response.{kind}.delta", {**place, "delta": text}) for text in texts),
            (f"response.{kind}.done", {**place, "text": whole}),
            ("response.output_item.done", {"output_index": index, "item": items[-1]}),
        ]
    final = response | {"output": items, "status": "completed"}
    events.append(("response.completed", {"response": final}))
    for sequence, (kind, fields) in enumerate(events):
        yield event(kind, sequence_number=sequence, **fields)


def message_events(number: int, tokens: list[str]) -> Iterator[bytes]:
    """A replica's stream of Anthropic's API."""
    yield event("message_start", message={"id": f"msg_{number}", "content": []})
    yield event("content_block_start", index=0, content_block={"type": "thinking"})
    for text in THOUGHT:
        yield event(
            "content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": text}
        )
    signature = {"type": "signature_delta", "signature": f"s_{number}"}
    yield event("content_block_delta", index=0, delta=signature)
    yield event("content_block_stop", index=0)
    yield event("content_block_start", index=1, content_block={"type": "text", "text": ""})
    for text in tokens:
        yield event("content_block_delta", index=1, delta={"type": "text_delta", "text": text})
    yield event("content_block_stop", index=1)
    yield event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 8})
    yield event("message_stop")


SOURCES = {RESPONSES: response_events, MESSAGES: message_events}


def parsed(body: bytes) -> list[dict[str, Any]]:
    events = []
    for each in body.decode().split("\n\n")[:-1]:
        name, data = each.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def unnamed(body: bytes) -> bytes:
    """Return a stream without the ids of its replica."""
    body = re.sub(rb'"created_at": ?[0-9]+', b'"created_at":0', body)
    return re.sub(rb'_[0-9]"', b'"', body)


def plain(events: list[dict[str, Any]]) -> Any:
    """Return what a client makes of a stream: texts joined, and all other events in order."""
    texts: dict[Any, str] = {}
    others = []
    for each in events:
        delta = each.get("delta")
        place = each.get("output_index", each.get("index"))
        if isinstance(delta, str):
            texts[place] = texts.get(place, "") + delta
        elif isinstance(delta, dict) and {"text", "thinking"} & delta.keys():
            texts[place] = texts.get(place, "") + str(delta.get("text", delta.get("thinking")))
        else:
            others.append({name: each[name] for name in each if name != "sequence_number"})
    return texts, others


@pytest.mark.parametrize("path", FORMS)
@settings(max_examples=12, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_a_continued_stream_equals_an_uninterrupted_one(path: str, data: st.DataObject) -> None:
    whole = b"".join(SOURCES[path](1, TOKENS))
    stream, received = client_stream(FORMS[path]), b""
    for number in range(1, data.draw(st.integers(1, 3)) + 1):
        # What is known comes in one piece, of any length.
        known = data.draw(st.integers(0, len(TOKENS)))
        tokens = TOKENS if number == 1 else ["".join(TOKENS[:known]), *TOKENS[known:]]
        body = b"".join(SOURCES[path](number, tokens))
        cut = data.draw(st.integers(0, len(body)))
        size = data.draw(st.integers(1, 700))
        for start in range(0, cut, size):
            received += stream.forward(body[start : min(cut, start + size)])
        if stream.complete:
            break
        stream.begin_again()
    else:
        received += stream.forward(b"".join(SOURCES[path](9, [TEXT])))

    events = parsed(received)
    assert plain(parsed(unnamed(received))) == plain(parsed(unnamed(whole)))
    if path == RESPONSES:
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        found = [each.get("item_id", (each.get("item") or {}).get("id")) for each in events]
        ids = {str(each) for each in found if each is not None}
        assert len(ids) == 2
        assert [item["id"] for item in events[-1]["response"]["output"]] == sorted(ids)[::-1]
        assert len({each["response"]["id"] for each in events if "response" in each}) == 1
    assert stream.complete


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("other", ["Grüße, you and more", "Gr"])
def test_a_replica_with_another_text_is_noticed(path: str, other: str) -> None:
    stream = client_stream(FORMS[path])
    body = b"".join(SOURCES[path](1, TOKENS))
    stream.forward(body[: body.index(b"\\n")])
    stream.begin_again()

    with pytest.raises(ContinuationError):
        stream.forward(b"".join(SOURCES[path](2, [other])))


async def relayed(path: str, *parts: Any) -> list[dict[str, Any]]:
    """Return the events that a client gets of a stream that cannot continue."""
    client = Client()
    request = RelayedRequest("POST", path, b"", [], b"{}", streams=True)
    replicas = FakeReplicas(*parts, end=ResponseEnd(generated_tokens=3))
    await relay_response(
        replicas, request, client.send, client.observer, Retries(first_pause_s=0.0)
    )
    assert client.ended
    return parsed(client.body)


@pytest.mark.parametrize("path", FORMS)
async def test_a_lost_stream_ends_in_its_own_grammar(path: str) -> None:
    source = list(SOURCES[path](1, TOKENS))
    parts = [Piece(each) for each in source[1:9]]

    events = await relayed(
        path, ResponseStart(200, EVENTS, source[0]), *parts, ReplicaLostError("dead")
    )

    failed = events[9:]
    if path == MESSAGES:
        (error,) = failed
        assert error["error"]["type"] == "overloaded_error"
        assert error["error"]["code"] == "engine_lost"
    else:
        error, last = failed
        assert (error["type"], error["code"], error["param"]) == ("error", "engine_lost", None)
        assert error["error"]["message"] == error["message"]
        assert last["type"] == "response.failed"
        assert (last["response"]["id"], last["response"]["status"]) == ("resp_1", "failed")
        assert last["response"]["error"]["code"] == "server_error"
        assert [each["sequence_number"] for each in events] == list(range(len(events)))


@pytest.mark.parametrize("path", FORMS)
async def test_a_stream_that_its_replica_ends_early_ends_with_an_error(path: str) -> None:
    source = list(SOURCES[path](1, TOKENS))

    events = await relayed(path, ResponseStart(200, EVENTS, source[0]), Piece(source[1]))
    whole = await relayed(path, ResponseStart(200, EVENTS, b"".join(source)))

    assert events[2]["type"] == "error"
    assert whole == parsed(b"".join(source))
