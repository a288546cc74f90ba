"""Frames on a connection between a gateway and a replica: a kind, a length, and a value.

Values are encoded as MessagePack and decoded into their declared types, so a frame holds data only:
reading one runs no code that the other end has chosen. Each kind has a largest length.

A connection begins with a handshake (`wire/handshake.py`). Then the gateway sends one `Call` at a
time. The replica answers with `Reply.FULL`, or with `Reply.ACCEPTED` and the parts of the response
(`wire/response.py`), of which a `ResponseEnd` or `ResponseBroken` is the last. A gateway that
closes the connection cancels the call.
"""

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from msgspec.msgpack import Decoder, Encoder

from deployments.wire.request import RelayedRequest
from deployments.wire.response import (
    Piece,
    ResponseBroken,
    ResponseEnd,
    ResponsePart,
    ResponseStart,
)

_HEADER = struct.Struct(">BI")
_MAX_LENGTH = 2**32 - 1
# A journal of three million tokens, five bytes each, and headers. The tokens of an answer are
# bounded by its model's context.
_JOURNAL_BYTES = 16 * 2**20
_SLICE_BYTES = 4 * 2**20


class Call(NamedTuple):
    """A call of a replica's method."""

    method: Literal["stream", "whole"]
    request: RelayedRequest


class Reply(StrEnum):
    """Whether a replica answers a call."""

    ACCEPTED = "accepted"
    FULL = "full"


class Address(NamedTuple):
    """Address of a replica, and the token (hex) that proves its identity and the gateway's."""

    host: str
    port: int
    token: str

    def as_text(self) -> str:
        """Return the address in one string."""
        return f"{self.token}@{self.host}:{self.port}"

    @classmethod
    def from_text(cls, text: str) -> "Address":
        """Read what `as_text` wrote."""
        token, _, place = text.partition("@")
        host, _, port = place.rpartition(":")
        return cls(host, int(port), token)


class FrameError(ConnectionError):
    """The other end has sent something other than an expected frame within its length."""


def max_call_bytes(max_body_bytes: int) -> int:
    """Return the largest length of a `Call`, from the limit on a request's body."""
    return min(max_body_bytes + _JOURNAL_BYTES, _MAX_LENGTH)


# Bodies of answers are sliced, so that they may have any length.
_MAX_BYTES: dict[type, int] = {
    Call: _MAX_LENGTH,
    Reply: 64,
    ResponseStart: _SLICE_BYTES + _JOURNAL_BYTES,
    Piece: _SLICE_BYTES + _JOURNAL_BYTES,
    ResponseEnd: 4096,
    ResponseBroken: 65_536,
}
_TYPES = tuple(_MAX_BYTES)
_NUMBERS = {kind: number for number, kind in enumerate(_TYPES)}
_DECODERS: list[Decoder[Any]] = [Decoder(kind) for kind in _TYPES]
_ENCODER = Encoder()
_REPLIES = {_NUMBERS[Reply]: _MAX_BYTES[Reply]}
_PARTS = {_NUMBERS[kind]: _MAX_BYTES[kind] for kind in _TYPES if kind not in (Call, Reply)}


def frame(value: Call | Reply | ResponsePart) -> bytes:
    """Return a value's frame. Raises TypeError for another type, and ValueError if too long."""
    kind = type(value)
    number = _NUMBERS.get(kind)
    if number is None:
        raise TypeError(f"no frame holds a value of type {kind.__name__}")
    data = _ENCODER.encode(value)
    if len(data) > _MAX_BYTES[kind]:
        raise ValueError(_too_long(number, len(data), _MAX_BYTES[kind]))
    return _HEADER.pack(number, len(data)) + data


def part_frames(part: ResponsePart | tuple[ResponseStart, ResponseEnd]) -> bytes:
    """Return the frames of a part of an answer; more than one if it is whole or its body long."""
    if isinstance(part, tuple) and not isinstance(part, Piece):
        start, end = part
        return part_frames(start) + part_frames(end)
    if not isinstance(part, ResponseStart | Piece) or len(part.body) <= _SLICE_BYTES:
        return frame(part)
    body = part.body
    first, *rest = (body[at : at + _SLICE_BYTES] for at in range(0, len(body), _SLICE_BYTES))
    # The journal goes first: it covers at least the text of all pieces so far.
    begin = (
        replace(part, body=first) if isinstance(part, ResponseStart) else part._replace(body=first)
    )
    return b"".join([frame(begin), *(frame(Piece(each)) for each in rest)])


async def read_call(reader: asyncio.StreamReader, max_bytes: int) -> Call:
    """Return the next call. Raises as `read_part`."""
    call: Call = await _read(reader, {_NUMBERS[Call]: max_bytes})
    return call


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Return the reply to a call. Raises as `read_part`."""
    reply: Reply = await _read(reader, _REPLIES)
    return reply


async def read_part(reader: asyncio.StreamReader) -> ResponsePart:
    """Return the next part of an answer.

    Raises FrameError, after which the connection is of no use, and IncompleteReadError at its end.
    """
    part: ResponsePart = await _read(reader, _PARTS)
    return part


async def _read(reader: asyncio.StreamReader, max_bytes: Mapping[int, int]) -> Any:
    """Return the next frame, of one of the kinds in `max_bytes`."""
    number, length = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if number not in max_bytes:
        raise FrameError(f"a frame of kind {number}, which is not expected here")
    if length > max_bytes[number]:
        raise FrameError(_too_long(number, length, max_bytes[number]))
    data = await reader.readexactly(length)
    try:
        return _DECODERS[number].decode(data)
    # Recursion: of nested values in a field that the type does not have.
    except (ValueError, RecursionError) as error:
        raise FrameError(f"an invalid frame of type {_TYPES[number].__name__}: {error}") from error


def _too_long(number: int, length: int, limit: int) -> str:
    name = _TYPES[number].__name__
    return f"a frame of type {name} with {length} bytes, more than {limit}"
