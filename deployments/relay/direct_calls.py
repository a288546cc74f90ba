"""The gateway's own connections to replicas, with Ray Serve's handle as the fallback."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from deployments.relay.relay import ModelReplicas, Progress
from deployments.relay.replica_calls import joined, unbroken
from deployments.routing.shared_router import ROUTERS
from deployments.wire.errors import NoReplicaError, ReplicaLostError
from deployments.wire.frames import (
    Address,
    Call,
    FrameError,
    Reply,
    frame,
    max_call_bytes,
    read_part,
    read_reply,
)
from deployments.wire.handshake import HandshakeError, greet_replica
from deployments.wire.request import RelayedRequest
from deployments.wire.response import Piece, ResponseEnd, ResponseStart, ends_response
from deployments.wire.start import StartReport

logger = logging.getLogger(__name__)

_CONNECT_S = 2.0
_MAX_IDLE = 64
_READ_BUFFER = 1 << 20
# Pause after a failed connection to an address; doubled with each further failure.
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 300.0


class Connection(NamedTuple):
    """A connection, and the longest call that its replica accepts (bytes)."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    max_call_bytes: int


@dataclass(slots=True)
class _Failure:
    """An address at which no connection could be opened, and when to try it again."""

    pause_s: float
    until_s: float


class DirectCalls:
    """`ModelReplicas` over connections of our own.

    The handle takes a request if all replicas are full or none is known, because it waits for room.
    It also takes requests whose replica has no address or cannot be reached. `max_body_bytes`
    returns the current limit on the bodies of requests.

    An address where no connection can be opened is tried again after a pause. The failure says
    nothing about the replica: a firewall or a stall looks like the end of its process. Only Ray
    Serve, which the handle asks meanwhile, declares replicas dead.
    """

    def __init__(
        self,
        deployment: str,
        handle: ModelReplicas,
        max_body_bytes: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.deployment = deployment
        self._handle = handle
        self._max_body_bytes = max_body_bytes
        self._idle: dict[Address, list[Connection]] = {}
        self._failures: dict[Address, _Failure] = {}
        self._clock = clock

    @property
    def num_running(self) -> int:
        """Running replicas, as last reported by the Serve controller; some may have died since."""
        return self._handle.num_running

    @property
    def num_unreachable(self) -> int:
        """See `ModelReplicas`."""
        router = ROUTERS.known(self.deployment)
        return 0 if router is None else len(router.addresses & self._failures.keys())

    async def answering(self, wait_s: float) -> int:
        """See `ModelReplicas`."""
        return await self._handle.answering(wait_s)

    async def starting(self) -> Sequence[StartReport]:
        """See `ModelReplicas`."""
        return await self._handle.starting()

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[ResponseStart | Piece | ResponseEnd, None]:
        """Yield the answer piece by piece. Raises ReplicaLostError."""
        call = await self._begin(Call("stream", request))
        if call is None:
            async with aclosing(self._handle.stream(request)) as answer:
                async for part in answer:
                    yield part
            return
        async with aclosing(call.parts()) as parts:
            async for part in parts:
                yield part

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[ResponseStart, ResponseEnd]:
        """Return the whole answer and its cost. Raises ReplicaLostError."""
        call = await self._begin(Call("whole", request))
        if call is None:
            return await self._handle.whole(request, progress)
        return await joined(call.parts(), progress)

    def close(self) -> None:
        """Close the idle connections."""
        for address in list(self._idle):
            self._close_idle(address)

    def _forget_gone(self) -> None:
        """Close the idle connections to replicas that are gone, and forget their failures."""
        router = ROUTERS.known(self.deployment)
        if router is None:
            return
        for address in (self._idle.keys() | self._failures.keys()) - router.addresses:
            self._close_idle(address)
            self._failures.pop(address, None)

    def _close_idle(self, address: Address) -> None:
        for connection in self._idle.pop(address, []):
            connection.writer.close()

    async def _begin(self, call: Call) -> "_RunningCall | None":
        """Send a call to the replica that the router chooses; None if the handle must do it."""
        router = ROUTERS.known(self.deployment)
        request_id = call.request.terms.request_id
        if router is None or request_id is None:
            return None
        data = frame(call)
        tried: set[str] = set()
        while True:
            replica = router.assign(request_id, call.request.hint, tried)
            address = None if replica is None else router.address_of(replica)
            if replica is None or address is None or replica in tried:
                break
            failure = self._failures.get(address)
            if failure is not None and self._clock() < failure.until_s:
                break
            tried.add(replica)
            try:
                connection = await self._sent(address, data, call.request.replica_wait_s)
            except BaseException:
                router.released(request_id, replica)
                raise
            if connection is not None:
                return _RunningCall(self, address, connection, replica, request_id)
        router.released(request_id)
        return None

    async def _sent(self, address: Address, data: bytes, wait_s: float) -> Connection | None:
        """Send a call's frame; None if the replica is full or cannot be reached.

        Raises NoReplicaError if the replica does not accept the call in time.
        """
        while True:
            idle = self._idle.get(address, [])
            is_new = not idle
            before = self._failures.get(address)
            connection = await self._connection(address, before) if is_new else idle.pop()
            if connection is None:
                return None
            if len(data) > connection.max_call_bytes:
                # The limit has changed since the connection was opened or the request was read.
                connection.writer.close()
                if is_new:
                    return None
                continue
            try:
                async with asyncio.timeout(wait_s):
                    if is_new:
                        await _greet(address, connection)
                    is_accepted = await _accepts(connection, data)
            except TimeoutError as error:
                connection.writer.close()
                message = f"no replica accepted the request within {wait_s:g} s"
                raise NoReplicaError(message) from error
            except (OSError, asyncio.IncompleteReadError) as error:
                _log_violation(address, error)
                # Idle connections may have broken while nobody used them, probably all of them.
                connection.writer.close()
                self._close_idle(address)
                if is_new:
                    self._failed(address, before, error)
                    return None
            except BaseException:
                connection.writer.close()
                raise
            else:
                if self._failures.pop(address, None) is not None:
                    logger.info(
                        "own connections to a replica work again",
                        extra={"host": address.host, "port": address.port},
                    )
                if is_accepted:
                    return connection
                self.kept(address, connection)
                return None

    async def _connection(self, address: Address, before: _Failure | None) -> Connection | None:
        """Open a connection; None if that fails. `before` is the failure before this attempt."""
        self._forget_gone()
        if before is not None:
            # One request tries again; others do not wait for it.
            before.until_s = self._clock() + before.pause_s
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, limit=_READ_BUFFER
                )
        except OSError as error:
            self._failed(address, before, error)
            return None
        return Connection(reader, writer, max_call_bytes(self._max_body_bytes()))

    def _failed(self, address: Address, before: _Failure | None, error: Exception) -> None:
        """Pause connection attempts to an address."""
        if self._failures.get(address) is not before:
            return  # Simultaneous attempts count once.
        pause_s = _FIRST_PAUSE_S if before is None else min(2 * before.pause_s, _MAX_PAUSE_S)
        self._failures[address] = _Failure(pause_s, self._clock() + pause_s)
        logger.warning(
            "no own connection to a replica; requests go through Ray Serve's handle",
            extra={
                "host": address.host,
                "port": address.port,
                "reason": repr(error),
                "next_attempt_s": pause_s,
            },
        )

    def kept(self, address: Address, connection: Connection) -> None:
        """Keep a connection for the next call."""
        idle = self._idle.setdefault(address, [])
        if len(idle) < _MAX_IDLE:
            idle.append(connection)
        else:
            connection.writer.close()


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
        complete = False
        try:
            while not complete:
                part = unbroken(await read_part(self._connection.reader), self._replica)
                complete = ends_response(part)
                yield part
        except (OSError, asyncio.IncompleteReadError) as error:
            _log_violation(self._address, error)
            raise ReplicaLostError(
                f"the connection to the replica broke: {error}", replica=self._replica
            ) from error
        finally:
            if complete:
                self._calls.kept(self._address, self._connection)
            else:
                self._connection.writer.close()  # Cancels the call.
            if router := ROUTERS.known(self._calls.deployment):
                router.released(self._request_id, self._replica)


async def _greet(address: Address, connection: Connection) -> None:
    try:
        await greet_replica(
            connection.reader,
            connection.writer,
            bytes.fromhex(address.token),
            connection.max_call_bytes,
        )
    except HandshakeError as error:
        logger.error(
            "another process listens at a replica's address; the request goes elsewhere",
            extra={"host": address.host, "port": address.port, "reason": str(error)},
        )
        raise


async def _accepts(connection: Connection, data: bytes) -> bool:
    connection.writer.write(data)
    await connection.writer.drain()
    return await read_reply(connection.reader) is Reply.ACCEPTED


def _log_violation(address: Address, error: Exception) -> None:
    """Log that a replica has sent something unexpected; other errors are broken connections."""
    if isinstance(error, FrameError):
        logger.error(
            "unexpected data from a replica; its connection is closed",
            extra={"host": address.host, "port": address.port, "reason": str(error)},
        )
