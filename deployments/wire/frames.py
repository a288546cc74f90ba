"""Frames on a connection between a gateway and a replica: a length, then a pickled object.

The gateway opens the connection with the replica's token. Then it sends one call at a time, a pair
of method and `RelayedRequest`. The replica answers with `ACCEPTED` and the parts of the answer
(`wire/answer.py`), or with `FULL`; `END` follows the last part. A gateway that closes the
connection cancels the call.
"""

import asyncio
import pickle
import struct
from typing import Any, NamedTuple

from deployments.wire.request import RelayedRequest

_LENGTH = struct.Struct(">I")
TOKEN_BYTES = 32
ACCEPTED, FULL, END = "accepted", "full", None


class Call(NamedTuple):
    """A call of a replica's method: `stream` or `whole`."""

    method: str
    request: RelayedRequest


class Address(NamedTuple):
    """Where a replica listens, and the token (hex) that it asks for."""

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


def frame(value: object) -> bytes:
    """Return a frame. Raises ValueError above 4 GiB."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    if len(data) >= 1 << 32:
        raise ValueError(f"a frame has at most 4 GiB, not {len(data)} bytes")
    return _LENGTH.pack(len(data)) + data


def write_frame(writer: asyncio.StreamWriter, value: object) -> None:
    """Write a frame into the connection's buffer. Raises ValueError above 4 GiB."""
    writer.write(frame(value))


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Return the next frame. Raises IncompleteReadError at the end of the connection.

    Only for connections whose other end has shown the token: a pickle can run code.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))
