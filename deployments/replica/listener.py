"""A replica's own connections with the gateways.

Requests that come through Ray Serve's handle pass its gRPC server, its wrappers and its pickler
with every piece of an answer. Gateways that know a replica's address call it directly instead;
the load report tells them (`wire/load.py`).
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Protocol

from deployments.wire.answer import ends_answer
from deployments.wire.frames import (
    ACCEPTED,
    END,
    FULL,
    TOKEN_BYTES,
    Address,
    Call,
    frame,
    read_frame,
    write_frame,
)
from deployments.wire.request import RelayedRequest

logger = logging.getLogger(__name__)

_TOKEN_WAIT_S = 10.0
# Above asyncio's own buffer, so that one large request needs few reads.
_READ_BUFFER = 1 << 20


class Answers(Protocol):
    """The calls of a replica that gateways make."""

    num_inside: int

    def stream(self, request: RelayedRequest) -> AsyncIterator[Any]: ...

    def whole(self, request: RelayedRequest) -> AsyncIterator[Any]: ...


class Listener:
    """Serves gateways' calls on a port of its own; `max_requests` is the replica's cap now."""

    def __init__(self, answers: Answers, max_requests: Callable[[], int]) -> None:
        self._methods = {"stream": answers.stream, "whole": answers.whole}
        self._answers = answers
        self._max_requests = max_requests
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._connections: set[asyncio.Task[None]] = set()
        self._num_calls = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._server: asyncio.Server | None = None
        self._closing = False

    async def start(self, host: str) -> Address:
        """Listen on a free port of this host."""
        self._server = await asyncio.start_server(self._connected, host, 0, limit=_READ_BUFFER)
        port: int = self._server.sockets[0].getsockname()[1]
        return Address(host, port, self._token.hex())

    async def close(self) -> None:
        """Accept no further connection or call, let the calls end, and close all connections.

        Ray Serve ends the process if that takes longer than its time for a graceful shutdown.
        """
        self._closing = True
        if self._server is not None:
            self._server.close()
        await self._is_idle.wait()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with asyncio.timeout(_TOKEN_WAIT_S):
                token = await reader.readexactly(TOKEN_BYTES)
            if hmac.compare_digest(token, self._token):
                while True:
                    await self._serve(await read_frame(reader), reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # The other end is gone, or is no gateway.
        except asyncio.CancelledError:
            pass  # By `close`; the task ends here.
        except Exception:
            # The gateway sees a broken connection, and may try another replica.
            logger.exception("a call from a gateway failed")
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(
        self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        num_inside = max(self._num_calls, self._answers.num_inside)
        if self._closing or num_inside >= self._max_requests():
            write_frame(writer, FULL)
            return
        write_frame(writer, ACCEPTED)
        self._num_calls += 1
        self._is_idle.clear()
        answer = asyncio.create_task(self._answer(call, writer))
        # Nothing comes while a call runs, so this ends with the connection only.
        gone = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ConnectionAbortedError("the gateway has closed the connection")
            last = answer.result()
            # First, or the gateway's next call would go to `gone`.
            gone.cancel()
            await asyncio.wait((gone,))
            # While the call counts: `close` waits for it, and the process ends after that.
            writer.write(last + frame(END))
            await writer.drain()
        finally:
            for task in (answer, gone):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait((answer, gone))
            self._num_calls -= 1
            if not self._num_calls:
                self._is_idle.set()

    async def _answer(self, call: Call, writer: asyncio.StreamWriter) -> bytes:
        """Send the parts of an answer but the last one, which is returned as a frame.

        It is sent with `END`: two packets would wake the gateway twice.
        """
        parts = self._methods[call.method](call.request)
        last = b""
        try:
            async for part in parts:
                if ends_answer(part):
                    last = frame(part)
                else:
                    write_frame(writer, part)
                    await writer.drain()
            return last
        finally:
            # An abandoned generator would leave its request in the engine.
            if (close := getattr(parts, "aclose", None)) is not None:
                await close()
