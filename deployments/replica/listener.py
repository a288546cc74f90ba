"""A replica's own connections with the gateways.

Requests that come through Ray Serve's handle pass its gRPC server, its wrappers and its pickler
with every piece of an answer. Gateways that know a replica's address call it directly instead;
the load report tells them (`wire/load.py`).
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Protocol

from deployments.wire.frames import (
    Address,
    Call,
    FrameError,
    Reply,
    frame,
    part_frames,
    read_call,
)
from deployments.wire.handshake import TOKEN_BYTES, HandshakeError, admit_gateway
from deployments.wire.request import RelayedRequest
from deployments.wire.response import ends_response

logger = logging.getLogger(__name__)

# Whoever reaches the port could fill the log otherwise.
_REFUSAL_LOG_PERIOD_S = 60.0
# Connections that wait to be accepted: a burst of new ones must not look like a lost network. The
# kernel lowers it to `net.core.somaxconn`.
_BACKLOG = 4096
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
        self._num_refused = 0
        self._refusal_logged_s = -math.inf

    async def start(self, host: str) -> Address:
        """Listen on a free port of this host."""
        self._server = await asyncio.start_server(
            self._connected, host, 0, limit=_READ_BUFFER, backlog=_BACKLOG
        )
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
        peer = str(writer.get_extra_info("peername"))
        try:
            max_call_bytes = await admit_gateway(reader, writer, self._token)
            while True:
                await self._serve(await read_call(reader, max_call_bytes), reader, writer)
        except HandshakeError as error:
            self._log_refusal(peer, error)
        except FrameError as error:
            logger.error(
                "unexpected data from a gateway; its connection is closed",
                extra={"peer": peer, "reason": str(error)},
            )
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # The other end is gone, or has said nothing.
        except asyncio.CancelledError:
            pass  # By `close`; the task ends here.
        except Exception:
            # The gateway sees a broken connection, and may try another replica.
            logger.exception("a call from a gateway failed")
        finally:
            self._connections.discard(task)
            writer.close()

    def _log_refusal(self, peer: str, error: HandshakeError) -> None:
        self._num_refused += 1
        now_s = time.monotonic()
        if now_s - self._refusal_logged_s >= _REFUSAL_LOG_PERIOD_S:
            self._refusal_logged_s = now_s
            logger.warning(
                "refused a connection that is not a gateway's",
                extra={"peer": peer, "reason": str(error), "num_refused": self._num_refused},
            )

    async def _serve(
        self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        num_inside = max(self._num_calls, self._answers.num_inside)
        if self._closing or num_inside >= self._max_requests():
            writer.write(frame(Reply.FULL))
            return
        writer.write(frame(Reply.ACCEPTED))
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
            writer.write(last)
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
        """Send the parts of an answer but the last one, which is returned as frames."""
        parts = self._methods[call.method](call.request)
        last = b""
        try:
            async for part in parts:
                if ends_response(part):
                    last = part_frames(part)
                else:
                    writer.write(part_frames(part))
                    await writer.drain()
            if not last:
                raise TypeError("an answer must end with its cost")
            return last
        finally:
            # An abandoned generator would leave its request in the engine.
            if (close := getattr(parts, "aclose", None)) is not None:
                await close()
