"""Parsing of chat completion streams, split into arbitrary chunks of bytes."""

import json
from typing import Any

import pytest

from cluster.loadtest.client import NotAStreamError, ResponseStream, StreamError


def event(text: str | None = None, **fields: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    content = {"choices": [{"index": 0, "delta": delta}]} | fields
    return b"data: " + json.dumps(content).encode() + b"\n\n"


WHOLE = (
    event("Ünter")
    + b": a comment\n\n"
    + event(" one\nand")
    + event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    + event(choices=[], usage={"completion_tokens": 4}, apar={"threads": 2})
    + b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 2, 7, len(WHOLE)])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_a_stream_may_be_split_anywhere(size: int, line_end: bytes) -> None:
    stream = ResponseStream()
    whole = WHOLE.replace(b"\n", line_end)

    for start in range(0, len(whole), size):
        stream.feed(whole[start : start + size], 1.0)

    assert "".join(stream.text) == "Ünter one\nand"
    assert [characters for _, characters in stream.pieces] == [5, 8]
    assert stream.finish_reason == "stop"
    assert stream.completion_tokens == 4
    assert stream.apar == {"threads": 2}
    assert stream.done


def test_an_event_s_data_may_have_several_lines() -> None:
    stream = ResponseStream()

    stream.feed(b'data: {"choices": [\ndata:   {"delta": {"content":\ndata: "x"}}]}\n\n', 1.0)

    assert stream.text == ["x"]


@pytest.mark.parametrize(
    "event",
    [
        b": ping\n\n",
        b"event: ping\ndata: now\n\n",
        b'event: ping\ndata: {"type": "ping"}\n\n',
        b'data: {"type": "ping"}\n\n',
        b"data:\n\n",
        b"data\n\n",
        b"id: 1\nretry: 10\n\n",
        b"\n",
        b'data: {"usage": {"prompt_tokens": 3}}\n\n',
        b'data: {"choices": null, "usage": {"prompt_tokens": 3}}\n\n',
    ],
)
def test_pings_comments_and_usage_without_choices_are_no_failures(event: bytes) -> None:
    stream = ResponseStream()

    stream.feed(event + WHOLE.replace(b"\n\n", b"\n\n" + event), 1.0)

    assert "".join(stream.text) == "Ünter one\nand"
    assert stream.done


def test_a_byte_order_mark_may_begin_the_stream() -> None:
    stream = ResponseStream()

    stream.feed(b"\xef\xbb\xbf" + event("a"), 1.0)

    assert stream.text == ["a"]


def test_a_paragraph_is_complete_at_the_line_break_behind_its_text() -> None:
    stream = ResponseStream()

    for time_s, text in enumerate(["\n", "  \nFirst", " words", ".\n\nSecond", " more\n"]):
        stream.feed(event(text), float(time_s))

    assert stream.paragraph_s == 3.0


def test_an_empty_piece_is_no_text() -> None:
    stream = ResponseStream()

    stream.feed(event("") + event("word"), 2.0)

    assert stream.pieces == [(2.0, 4)]


def test_reasoning_text_counts() -> None:
    stream = ResponseStream()

    stream.feed(event(choices=[{"delta": {"reasoning_content": "hm"}}]), 1.0)

    assert stream.pieces == [(1.0, 2)]


def test_usage_comes_after_the_answer_s_end() -> None:
    stream = ResponseStream()

    stream.feed(event("word"), 1.0)
    stream.feed(event(choices=[{"delta": {}, "finish_reason": "stop"}]), 2.0)
    stream.feed(event(choices=[], usage={"completion_tokens": 1}) + b"data: [DONE]\n\n", 3.0)

    assert stream.last_s == 2.0


def test_an_error_within_the_stream_is_raised_with_its_message() -> None:
    stream = ResponseStream()

    with pytest.raises(StreamError, match="the engine died"):
        stream.feed(b'data: {"error": {"message": "the engine died"}}\n\n', 1.0)
    with pytest.raises(StreamError, match="no engine"):
        stream.feed(b"event: error\ndata: no engine\n\n", 1.0)


@pytest.mark.parametrize(
    "payload",
    [
        b"hello",
        b"[1]",
        b"null",
        b'{"choices": [3]}',
        b'{"choices": [{"delta": {"content": 3}}]}',
        b'{"choices": [], "usage": 3}',
        b'{"choices": [], "apar": [1]}',
        b'{"choices": [], "apar": {"decode_steps": "many"}}',
    ],
)
def test_an_invalid_chunk_is_refused(payload: bytes) -> None:
    stream = ResponseStream()

    with pytest.raises(NotAStreamError):
        stream.feed(b"data: " + payload + b"\n\n", 1.0)
