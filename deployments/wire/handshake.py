"""Mutual authentication at the start of a connection between a gateway and a replica.

Both ends know the replica's token, which Ray carries with the load report. It never travels here:
each end proves that it knows it, by an HMAC-SHA256 over its role and everything sent before, which
includes a new nonce of either end. So a proof holds for one connection and one direction.

    gateway                         replica
    version, nonce              ->
                                <-  version, nonce, proof
    limit of a call, proof      ->

Frames follow (`wire/frames.py`). Like Ray's own traffic, they are neither encrypted nor signed.
Both ends send TCP keepalives: a gateway notices within half a minute that the node of a replica is
gone, a replica within five minutes that the gateway's is.
"""

import asyncio
import hmac
import secrets
import socket
import struct

PROTOCOL = 3
"""Version of handshake and frames. Version 1 had no handshake, version 2 no `certain_tokens`."""
TOKEN_BYTES = 32

_HANDSHAKE_S = 10.0
_GREETING = struct.Struct(">4sI32s")
_MAGIC = b"apar"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LIMIT = struct.Struct(">I")

# A node that vanishes closes no connection.
_KEEPALIVE = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 10),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 5),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 4),
)
# Linux also breaks the connection if the other end lives but reads nothing for so long. A replica
# reads at once; a gateway stops reading while its client does.
_USER_TIMEOUT = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
_SILENT_REPLICA_MS = 30_000
_SILENT_GATEWAY_MS = 300_000


class HandshakeError(ConnectionError):
    """The other end does not know the token, or speaks another protocol or version."""


async def greet_replica(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, max_call_bytes: int
) -> None:
    """Check that the other end is the replica, then prove to be a gateway.

    Raises HandshakeError if it is another process, which then has received a nonce and no more.
    Raises OSError or IncompleteReadError if the connection breaks or the other end is silent.
    """
    _keep_alive(writer, _SILENT_REPLICA_MS)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            greeting = _greeting()
            writer.write(greeting)
            said = greeting + await _read_greeting(reader)
            _check(await reader.readexactly(_PROOF_BYTES), token, b"replica", said)
    except TimeoutError as error:
        raise ConnectionAbortedError(f"no handshake within {_HANDSHAKE_S:g} s") from error
    limit = _LIMIT.pack(max_call_bytes)
    writer.write(limit + _proof(token, b"gateway", said + limit))


async def admit_gateway(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes
) -> int:
    """Prove to be the replica, and check that the other end is a gateway.

    Returns the gateway's limit on the bytes of a call. Raises HandshakeError if it is no gateway,
    and OSError or IncompleteReadError if the connection breaks or the other end is silent.
    """
    _keep_alive(writer, _SILENT_GATEWAY_MS)
    async with asyncio.timeout(_HANDSHAKE_S):
        said = await _read_greeting(reader)
        greeting = _greeting()
        said += greeting
        writer.write(greeting + _proof(token, b"replica", said))
        limit = await reader.readexactly(_LIMIT.size)
        _check(await reader.readexactly(_PROOF_BYTES), token, b"gateway", said + limit)
    (max_call_bytes,) = _LIMIT.unpack(limit)
    return int(max_call_bytes)


def _keep_alive(writer: asyncio.StreamWriter, silence_ms: int) -> None:
    connected: socket.socket = writer.get_extra_info("socket")
    for option, value in (*_KEEPALIVE, (_USER_TIMEOUT, silence_ms)):
        connected.setsockopt(*option, value)


def _greeting() -> bytes:
    return _GREETING.pack(_MAGIC, PROTOCOL, secrets.token_bytes(_NONCE_BYTES))


async def _read_greeting(reader: asyncio.StreamReader) -> bytes:
    greeting = await reader.readexactly(_GREETING.size)
    magic, version, _ = _GREETING.unpack(greeting)
    if magic != _MAGIC:
        raise HandshakeError("the other end speaks another protocol")
    if version != PROTOCOL:
        raise HandshakeError(
            f"the other end speaks version {version} of the protocol, this end version {PROTOCOL}"
        )
    return greeting


def _proof(token: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(token, role + said, "sha256")


def _check(proof: bytes, token: bytes, role: bytes, said: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(token, role, said)):
        raise HandshakeError("the other end does not know the token")
