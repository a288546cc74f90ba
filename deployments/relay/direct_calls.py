"""The gateway's own connections to replicas, with Ray Serve's handle where there is none."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from deployments.relay.relay import ModelReplicas, Progress
from deployments.relay.replica_calls import joined, unbroken
from deployments.routing.shared_router import ROUTERS
from deployments.wire.answer import AnswerEnd, AnswerStart, Piece
from deployments.wire.errors import NoReplicaError, ReplicaLostError
from deployments.wire.frames import ACCEPTED, END, Address, Call, read_frame, write_frame
from deployments.wire.request import RelayedRequest
from deployments.wire.start import StartReport

logger = logging.getLogger(__name__)

_CONNECT_S = 2.0
_MAX_IDLE = 64
_READ_BUFFER = 1 << 20
# A node that vanishes closes no connection: half a minute later its requests go elsewhere.
_KEEPALIVE = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 10),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 5),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 4),
    ((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), 30_000),
)

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class DirectCalls:
    """`ModelReplicas` over connections of our own.

    The handle takes a request if all replicas are full or none is known, because it waits for room.
    It also takes one whose replica has no address or cannot be reached.
    """

    def __init__(self, deployment: str, handle: ModelReplicas) -> None:
        self.deployment = deployment
        self._handle = handle
        self._idle: dict[Address, list[Connection]] = {}
        self._unreachable: set[Address] = set()

    @property
    def num_running(self) -> int:
        """Running replicas, as the Serve controller last reported; it may have died since."""
        return self._handle.num_running

    async def answering(self, wait_s: float) -> int:
        """See `ModelReplicas`."""
        return await self._handle.answering(wait_s)

    async def starting(self) -> Sequence[StartReport]:
        """See `ModelReplicas`."""
        return await self._handle.starting()

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[AnswerStart | Piece | AnswerEnd, None]:
        """Yield the answer piece by piece. Raises ReplicaLostError."""
        call = await self._begin(Call("stream", request))
        if call is None:
            async with aclosing(self._handle.stream(request)) as answer:
                async for part in answer:
                    yield part
            return
        async with aclosing(call.parts()) as parts:
            async for part in parts:
                yield Piece.from_wire(part) if isinstance(part, tuple) else part

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[AnswerStart, AnswerEnd]:
        """Return the whole answer and its cost. Raises ReplicaLostError."""
        call = await self._begin(Call("whole", request))
        if call is None:
            return await self._handle.whole(request, progress)
        return await joined(call.parts(), progress)

    def close(self) -> None:
        """Close the idle connections."""
        for address in list(self._idle):
            self._close_idle(address)

    def _close_idle(self, address: Address) -> None:
        for _, writer in self._idle.pop(address, []):
            writer.close()

    async def _begin(self, call: Call) -> "_RunningCall | None":
        """Send a call to the replica that the router chooses; None if the handle must do that."""
        router = ROUTERS.known(self.deployment)
        request_id = call.request.terms.request_id
        if router is None or request_id is None:
            return None
        tried: set[str] = set()
        while True:
            replica = router.assign(request_id, call.request.hint, tried)
            address = None if replica is None else router.address_of(replica)
            if replica is None or address is None or replica in tried:
                break
            if address in self._unreachable:
                break
            tried.add(replica)
            try:
                connection = await self._sent(address, call)
            except ConnectionRefusedError:
                router.died(replica)
                continue
            except BaseException:
                router.released(request_id, replica)
                raise
            if connection is not None:
                return _RunningCall(self, address, connection, replica, request_id)
        router.released(request_id)
        return None

    async def _sent(self, address: Address, call: Call) -> Connection | None:
        """Send a call; None if the replica is full or cannot be reached.

        Raises ConnectionRefusedError if the replica's process has ended, and NoReplicaError if it
        does not accept the call in time.
        """
        while True:
            idle = self._idle.get(address, [])
            is_new = not idle
            connection = await self._connection(address) if is_new else idle.pop()
            if connection is None:
                return None
            try:
                async with asyncio.timeout(call.request.replica_wait_s):
                    is_accepted = await _accepts(connection, call)
            except TimeoutError as error:
                connection[1].close()
                wait_s = call.request.replica_wait_s
                message = f"no replica accepted the request within {wait_s:g} s"
                raise NoReplicaError(message) from error
            except (OSError, asyncio.IncompleteReadError):
                # Idle connections may have broken while nobody used them, probably all of them.
                connection[1].close()
                self._close_idle(address)
                if is_new:
                    return None
            except BaseException:
                connection[1].close()
                raise
            else:
                if is_accepted:
                    return connection
                self.kept(address, connection)
                return None

    async def _connection(self, address: Address) -> Connection | None:
        """Open a connection; None, from now on, if the network lets none through."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await _connected(address)
        except ConnectionRefusedError:
            raise
        except (OSError, TimeoutError) as error:
            self._unreachable.add(address)
            logger.warning(
                "no own connection to a replica; requests go through Ray Serve's handle",
                extra={"host": address.host, "port": address.port, "reason": str(error)},
            )
            return None

    def kept(self, address: Address, connection: Connection) -> None:
        """Keep a connection for the next call."""
        idle = self._idle.setdefault(address, [])
        if len(idle) < _MAX_IDLE:
            idle.append(connection)
        else:
            connection[1].close()


class _RunningCall:
    """A call that a replica has accepted."""

    def __init__(
        self,
        calls: DirectCalls,
        address: Address,
        connection: Connection,
        replica: str,
        request_id: str,
    ) -> None:
        self._calls = calls
        self._address = address
        self._connection = connection
        self._replica = replica
        self._request_id = request_id

    async def parts(self) -> AsyncGenerator[Any, None]:
        """Yield the parts of the answer. Raises ReplicaLostError."""
        reader, writer = self._connection
        complete = False
        try:
            while (part := await read_frame(reader)) is not END:
                yield unbroken(part, self._replica)
            complete = True
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ReplicaLostError(f"the connection to the replica broke: {error}") from error
        finally:
            if complete:
                self._calls.kept(self._address, self._connection)
            else:
                writer.close()  # Cancels the call.
            if router := ROUTERS.known(self._calls.deployment):
                router.released(self._request_id, self._replica)


async def _connected(address: Address) -> Connection:
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=_READ_BUFFER)
    connected: socket.socket = writer.get_extra_info("socket")
    for option, value in _KEEPALIVE:
        connected.setsockopt(*option, value)
    writer.write(bytes.fromhex(address.token))
    return reader, writer


async def _accepts(connection: Connection, call: Call) -> bool:
    reader, writer = connection
    write_frame(writer, call)
    await writer.drain()
    return bool(await read_frame(reader) == ACCEPTED)
