"""What frames carry, and what arrives instead of a frame."""

import asyncio
import pickle
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from apar_core.journal import ThreadDelta
from deployments.wire.frames import (
    Call,
    FrameError,
    Reply,
    frame,
    max_call_bytes,
    part_frames,
    read_call,
    read_part,
    read_reply,
)
from deployments.wire.request import Deadlines, RelayedRequest, RequestHint, RequestTerms
from deployments.wire.response import Piece, ResponseBroken, ResponseEnd, ResponseStart

COUNTS = st.integers(0, 2**40)
TEXTS = st.text(max_size=20)
BYTES = st.binary(max_size=50)
FLOATS = st.floats(allow_nan=False)
HEADERS = st.lists(st.tuples(BYTES, BYTES), max_size=3)
JOURNALS = st.lists(
    st.builds(
        ThreadDelta,
        st.lists(st.integers(0, 300), max_size=3).map(tuple),
        st.lists(st.integers(0, 2**18), max_size=5).map(tuple),
        st.none() | st.integers(0, 5),
    ),
    max_size=3,
).map(tuple)
HASHES = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple)
CALLS = st.builds(
    Call,
    st.sampled_from(("stream", "whole")),
    st.builds(
        RelayedRequest,
        TEXTS,
        TEXTS,
        BYTES,
        HEADERS,
        BYTES,
        st.builds(
            RequestTerms,
            st.none() | TEXTS,
            st.integers(-(2**31), 2**31),
            st.none() | TEXTS,
            st.none() | COUNTS,
            st.none() | TEXTS,
            st.none() | TEXTS,
            st.booleans(),
            st.none() | JOURNALS,
            st.none() | st.dictionaries(TEXTS, TEXTS, max_size=2),
            st.none() | st.builds(Deadlines, st.none() | FLOATS, st.none() | FLOATS),
        ),
        st.builds(
            RequestHint,
            COUNTS,
            st.none() | COUNTS,
            HASHES,
            st.booleans(),
            st.lists(COUNTS, max_size=3).map(tuple),
            COUNTS,
            st.none() | COUNTS,
            st.none() | st.integers(-(2**63), 2**63 - 1),
            FLOATS,
            FLOATS,
        ),
        st.booleans(),
        st.booleans(),
        FLOATS,
    ),
)
PARTS: st.SearchStrategy[Any] = (
    st.builds(
        ResponseStart,
        st.integers(100, 599),
        HEADERS,
        BYTES,
        JOURNALS,
        COUNTS,
        st.booleans(),
        COUNTS,
        COUNTS,
    )
    | st.builds(Piece, BYTES, JOURNALS, COUNTS, COUNTS, COUNTS)
    | st.builds(
        ResponseEnd, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.none() | TEXTS, FLOATS, FLOATS
    )
    | st.builds(ResponseBroken, TEXTS, st.booleans())
)
LIMIT = max_call_bytes(1000)


def reader_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def read(read_one: Any, data: bytes, *limit: int) -> Any:
    async def run() -> Any:
        return await read_one(reader_of(data), *limit)

    return asyncio.run(run())


@given(CALLS)
def test_a_call_arrives_as_it_was_sent(call: Call) -> None:
    assert read(read_call, frame(call), LIMIT) == call


@given(PARTS)
def test_a_part_of_an_answer_arrives_as_it_was_sent(part: Any) -> None:
    arrived = read(read_part, part_frames(part))

    assert (type(arrived), arrived) == (type(part), part)


@pytest.mark.parametrize("reply", Reply)
def test_a_reply_arrives_as_it_was_sent(reply: Reply) -> None:
    assert read(read_reply, frame(reply)) is reply


def test_a_long_body_is_cut_into_frames_after_its_journal() -> None:
    body = bytes(range(256)) * 40_000
    journal = (ThreadDelta((0,), (1, 2)),)
    whole = (ResponseStart(200, [], body, journal, 2), ResponseEnd(1, 2))

    async def arrived(data: bytes) -> list[Any]:
        reader = reader_of(data)
        parts: list[Any] = []
        while not reader.at_eof():
            parts.append(await read_part(reader))
        return parts

    start, *rest, end = asyncio.run(arrived(part_frames(whole)))
    first, *pieces = asyncio.run(arrived(part_frames(Piece(body, journal, 2))))

    assert (start.journal, start.num_tokens, end) == (journal, 2, ResponseEnd(1, 2))
    assert (first.journal, first.num_tokens) == (journal, 2)
    assert [each[1:] for each in rest] == [each[1:] for each in pieces] == [((), 0, 0, 0)] * 2
    assert b"".join(each.body for each in (start, *rest)) == body
    assert b"".join(each.body for each in (first, *pieces)) == body


HEADS = st.tuples(st.integers(0, 10), st.integers(0, 40))


@given(st.binary(max_size=60), st.none() | HEADS)
# A map with an unknown field of nested lists, deeper than Python's stack.
@example(b"\x81\xa1z" + b"\x91" * 100_000 + b"\x01", (3, 100_004))
@example(b"\xdd\xff\xff\xff\xff", (4, 5))
@example(b"\xa2\xff\xff", (1, 3))
def test_arbitrary_bytes_are_a_protocol_error_or_an_early_end(
    data: bytes, head: tuple[int, int] | None
) -> None:
    if head is not None:
        data = struct.pack(">BI", *head) + data
    for read_one, limit in ((read_call, (LIMIT,)), (read_reply, ()), (read_part, ())):
        with suppress(FrameError, asyncio.IncompleteReadError):
            read(read_one, data, *limit)


class Runs:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle has run",)


def test_a_pickle_is_data_that_no_frame_holds() -> None:
    payload = pickle.dumps(Runs())
    for number in range(7):
        data = struct.pack(">BI", number, len(payload)) + payload
        for read_one, limit in ((read_call, (LIMIT,)), (read_reply, ()), (read_part, ())):
            with pytest.raises(FrameError):
                read(read_one, data, *limit)


@pytest.mark.parametrize(
    ("value", "read_one", "limit", "most"),
    [
        (Call("whole", RelayedRequest("POST", "/", b"", [], b"")), read_call, (1000,), 1000),
        (Reply.FULL, read_reply, (), 64),
        (ResponseStart(200, [], b""), read_part, (), 20 * 2**20),
        (Piece(b""), read_part, (), 20 * 2**20),
        (ResponseEnd(), read_part, (), 4096),
        (ResponseBroken("dead"), read_part, (), 65_536),
    ],
)
def test_each_kind_of_frame_has_a_largest_length(
    value: Any, read_one: Any, limit: tuple[int, ...], most: int
) -> None:
    head = frame(value)[:1] + struct.pack(">I", most + 1)
    name = type(value).__name__

    # Refused by its header: nothing waits for the rest.
    with pytest.raises(FrameError, match=f"{name} with {most + 1} bytes, more than {most}"):
        read(read_one, head, *limit)


def test_a_call_is_bounded_by_the_limit_on_bodies_and_room_for_a_journal() -> None:
    assert max_call_bytes(16 * 2**20) == 32 * 2**20
    assert max_call_bytes(2**40) == 2**32 - 1


def test_what_is_too_long_is_not_sent() -> None:
    with pytest.raises(ValueError, match="ResponseBroken with 70026 bytes, more than 65536"):
        frame(ResponseBroken("x" * 70_000))


@pytest.mark.parametrize("value", [None, ValueError("no"), {"a": 1}, 5])
def test_a_value_of_another_type_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match=f"type {type(value).__name__}"):
        frame(value)


def test_a_frame_out_of_place_is_an_error() -> None:
    with pytest.raises(FrameError, match="kind 1, which is not expected"):
        read(read_part, frame(Reply.ACCEPTED))
    with pytest.raises(FrameError, match="kind 3"):
        read(read_reply, frame(Piece(b"x")))
