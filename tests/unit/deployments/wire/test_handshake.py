"""The handshake of two ends that know the token, and of ends that do not."""

import asyncio
import hmac
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from deployments.wire import handshake
from deployments.wire.handshake import (
    PROTOCOL,
    HandshakeError,
    admit_gateway,
    greet_replica,
)

TOKEN = bytes(range(32))
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Ends, Ends]]:
    """Both ends of a connection."""
    accepted: asyncio.Future[Ends] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(
        lambda reader, writer: accepted.set_result((reader, writer)), "127.0.0.1", 0
    )
    gateway = await asyncio.open_connection(*server.sockets[0].getsockname())
    replica = await accepted
    yield gateway, replica
    for _, writer in (gateway, replica):
        writer.close()
    server.close()


async def test_both_ends_learn_that_the_other_knows_the_token(pair: tuple[Ends, Ends]) -> None:
    gateway, replica = pair

    _, limit = await asyncio.gather(
        greet_replica(*gateway, TOKEN, 12_345), admit_gateway(*replica, TOKEN)
    )

    assert limit == 12_345
    # A gateway may read nothing for longer, while its client does not: the kernel would break the
    # connection although it lives.
    for (_, writer), silence_ms in ((gateway, 30_000), (replica, 300_000)):
        connected = writer.get_extra_info("socket")
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == silence_ms


async def kept(reader: asyncio.StreamReader, into: bytearray) -> None:
    while data := await reader.read(1 << 16):
        into += data


async def test_the_token_does_not_travel(pair: tuple[Ends, Ends]) -> None:
    (gateway_reader, gateway_writer), replica = pair
    sent = bytearray()
    write = gateway_writer.write

    def noted(data: bytes) -> None:
        sent.extend(data)
        write(data)

    gateway_writer.write = noted  # type: ignore[method-assign,assignment]
    await asyncio.gather(
        greet_replica(gateway_reader, gateway_writer, TOKEN, 1), admit_gateway(*replica, TOKEN)
    )

    assert len(sent) == 40 + 4 + 32
    assert TOKEN not in sent


def proof(role: bytes, said: bytes, token: bytes) -> bytes:
    return hmac.digest(token, role + said, "sha256")


Answer = Callable[[bytes], bytes]
GREETING = struct.pack(">4sI32s", b"apar", PROTOCOL, b"n" * 32)
ROGUE_REPLICAS: dict[str, tuple[Answer, str]] = {
    "knows another token": (
        lambda said: GREETING + proof(b"replica", said + GREETING, b"x" * 32),
        "does not know the token",
    ),
    "reflects the greeting": (lambda said: said + bytes(32), "does not know the token"),
    "proves to be a gateway": (
        lambda said: GREETING + proof(b"gateway", said + GREETING, TOKEN),
        "does not know the token",
    ),
    "replays a proof": (
        lambda said: GREETING + proof(b"replica", GREETING + GREETING, TOKEN),
        "does not know the token",
    ),
    "is a web server": (lambda said: b"HTTP/1.1 400 Bad Request\r\n" * 9, "another protocol"),
    "is of the next version": (
        lambda said: struct.pack(">4sI32s", b"apar", PROTOCOL + 1, bytes(32)) + bytes(32),
        f"speaks version {PROTOCOL + 1} of the protocol, this end version {PROTOCOL}",
    ),
}


@pytest.mark.parametrize("name", ROGUE_REPLICAS)
async def test_a_gateway_tells_a_process_that_is_not_its_replica_no_more_than_a_nonce(
    pair: tuple[Ends, Ends], name: str
) -> None:
    gateway, (reader, writer) = pair
    answer, message = ROGUE_REPLICAS[name]

    async def rogue() -> bytes:
        said = await reader.readexactly(40)
        writer.write(answer(said))
        return said + await reader.read()

    answering = asyncio.create_task(rogue())
    with pytest.raises(HandshakeError, match=message):
        await greet_replica(*gateway, TOKEN, 1)
    gateway[1].close()

    assert len(await answering) == 40


ROGUE_GATEWAYS: dict[str, tuple[Answer, str]] = {
    "knows another token": (
        lambda said: bytes(4) + proof(b"gateway", said + bytes(4), b"x" * 32),
        "does not know the token",
    ),
    # The last bytes that it received are the replica's own proof.
    "reflects the proof": (lambda said: bytes(4) + said[-32:], "does not know the token"),
    "changes the limit": (
        lambda said: bytes(4) + proof(b"gateway", said[:80] + b"\xff" * 4, TOKEN),
        "does not know the token",
    ),
}


@pytest.mark.parametrize("name", ROGUE_GATEWAYS)
async def test_a_replica_admits_no_process_without_the_token(
    pair: tuple[Ends, Ends], name: str
) -> None:
    (reader, writer), replica = pair
    answer, message = ROGUE_GATEWAYS[name]

    async def rogue() -> None:
        writer.write(GREETING)
        received = await reader.readexactly(40 + 32)
        writer.write(answer(GREETING + received))

    calling = asyncio.create_task(rogue())
    with pytest.raises(HandshakeError, match=message):
        await admit_gateway(*replica, TOKEN)
    await calling


async def test_a_replica_proves_nothing_to_another_protocol(pair: tuple[Ends, Ends]) -> None:
    (reader, writer), replica = pair
    # As a gateway of version 1 did, which sent the token first.
    writer.write(TOKEN + b"\x00\x00\x00\x10a pickled request")

    with pytest.raises(HandshakeError, match="another protocol"):
        await admit_gateway(*replica, TOKEN)
    replica[1].close()
    assert await reader.read() == b""


@pytest.mark.parametrize(
    ("at", "error"), [("replica", TimeoutError), ("gateway", ConnectionAbortedError)]
)
async def test_a_silent_end_is_left(
    pair: tuple[Ends, Ends], at: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_HANDSHAKE_S", 0.05)
    gateway, replica = pair
    left: Awaitable[object] = (
        admit_gateway(*replica, TOKEN) if at == "replica" else greet_replica(*gateway, TOKEN, 1)
    )

    with pytest.raises(error):
        await asyncio.wait_for(left, 60)
