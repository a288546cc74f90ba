"""Calls over real connections, to replicas that answer without an engine."""

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apar_core.journal import ThreadDelta
from deployments.config.routing import RoutingSettings
from deployments.relay.direct_calls import DirectCalls
from deployments.relay.relay import Progress
from deployments.replica.listener import Listener
from deployments.routing.shared_router import ROUTERS, SharedRouter
from deployments.wire.errors import NoReplicaError, ReplicaBrokenError, ReplicaLostError
from deployments.wire.frames import Address, Call, Reply, frame, read_part, read_reply
from deployments.wire.handshake import admit_gateway, greet_replica
from deployments.wire.load import ReplicaLoad
from deployments.wire.request import RelayedRequest, RequestTerms
from deployments.wire.response import Piece, ResponseBroken, ResponseEnd, ResponseStart
from tests.fakes.rogue_peer import RoguePeer

REQUEST = RelayedRequest(
    "POST", "/v1/completions", b"", [], b"{}", RequestTerms("r"), replica_wait_s=60
)
START, END = ResponseStart(200, [], b"data: 1\n\n"), ResponseEnd(3, 4, 1, 0, 4)
PIECES = [Piece(b"x" * 100_000, (ThreadDelta((0,), (1, 2)),), 2), Piece(b"", (), 0)]


class Answers:
    """Answers each request with the same parts; waits before the last one if `holds`."""

    def __init__(self, *parts: Any, holds: bool = False) -> None:
        self.parts = parts
        self.holds = holds
        self.num_inside = 0
        self.released = asyncio.Event()
        self.ended = asyncio.Event()
        self.num_calls = 0
        self.expected = REQUEST

    async def stream(self, request: RelayedRequest) -> AsyncIterator[Any]:
        assert request == self.expected
        self.num_calls += 1
        self.num_inside += 1
        try:
            for part in self.parts[:-1]:
                yield part
            if self.holds:
                await self.released.wait()
            yield self.parts[-1]
        finally:
            self.num_inside -= 1
            self.ended.set()

    whole = stream


class Handle:
    """Ray Serve's way, which notes its calls."""

    num_running = 1

    def __init__(self) -> None:
        self.num_calls = 0

    async def stream(self, request: RelayedRequest) -> AsyncIterator[Any]:
        self.num_calls += 1
        yield START
        yield END

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[ResponseStart, ResponseEnd]:
        self.num_calls += 1
        return START, END


class Cluster:
    """Replicas `r0`, `r1`, ... of a deployment, and the calls to them."""

    def __init__(self) -> None:
        self.handle = Handle()
        self.router = SharedRouter(RoutingSettings(), seed=1)
        self.max_body_bytes = 1000
        self.now_s = 0.0
        self.calls: Any = DirectCalls(
            "direct",
            self.handle,  # type: ignore[arg-type]
            lambda: self.max_body_bytes,
            lambda: self.now_s,
        )
        self.listeners: list[Listener] = []
        self.caps: dict[str, int] = {}

    async def add(self, answers: Answers, cap: int = 8) -> Address:
        listener = Listener(answers, lambda: cap)
        address = await listener.start("127.0.0.1")
        self.listeners.append(listener)
        self.know(address)
        return address

    def know(self, address: Address, **fields: Any) -> None:
        """Tell the router of a replica at this address, which it may then choose."""
        name = f"r{len(self.caps)}"
        self.caps[name] = 8
        self.router.replicas_changed(self, dict(self.caps))
        load = ReplicaLoad(0, 0, 0, 9, 9, 16, 1.0, 1.0, 0.0, address=address.as_text(), **fields)
        self.router.reported(name, load)

    async def stream(self, request: RelayedRequest = REQUEST) -> list[Any]:
        async with aclosing(self.calls.stream(request)) as parts:
            return [part async for part in parts]


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    made = Cluster()
    monkeypatch.setitem(ROUTERS._routers, "direct", made.router)
    yield made
    made.calls.close()
    for listener in made.listeners:
        await listener.close()
    assert made.router.num_sent == 0


async def test_connections_to_replicas_that_are_gone_are_closed(cluster: Cluster) -> None:
    await cluster.add(Answers(START, END))
    await cluster.stream()
    await cluster.add(Answers(START, END))

    del cluster.caps["r0"]
    cluster.router.replicas_changed(cluster, dict(cluster.caps))
    cluster.caps["r0"] = 0  # Names of later replicas stay unique.
    await cluster.stream()

    async with asyncio.timeout(30):
        while cluster.listeners[0]._connections:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0.001)
    assert cluster.listeners[1]._connections


async def test_a_stream_arrives_as_it_was_sent_over_one_connection(cluster: Cluster) -> None:
    await cluster.add(Answers(START, *PIECES, END))

    for _ in range(300):
        assert await cluster.stream() == [START, *PIECES, END]

    assert len(cluster.listeners[0]._connections) == 1
    assert cluster.handle.num_calls == 0


async def test_a_whole_answer_reports_its_progress(cluster: Cluster) -> None:
    await cluster.add(Answers(Piece(b"", (), 0, 9), Piece(b"", (), 5, 9), (START, END)))
    counts: list[tuple[int, int]] = []

    assert await cluster.calls.whole(REQUEST, lambda *told: counts.append(told)) == (START, END)
    assert counts == [(0, 9), (5, 9)]


async def test_the_handle_is_used_if_the_settings_say_so(cluster: Cluster) -> None:
    await cluster.add(Answers(START, END))
    cluster.router.configure(RoutingSettings(direct=False))

    assert await cluster.stream() == [START, END]
    assert cluster.handle.num_calls == 1


async def test_a_client_that_leaves_ends_the_call(cluster: Cluster) -> None:
    answers = Answers(START, END, holds=True)
    await cluster.add(answers)
    async with aclosing(cluster.calls.stream(REQUEST)) as parts:
        assert await anext(parts) == START
        assert (answers.num_inside, cluster.router.num_sent) == (1, 1)

    await asyncio.wait_for(answers.ended.wait(), 60)
    assert answers.num_inside == 0


async def test_a_full_replica_refuses_and_another_answers(cluster: Cluster) -> None:
    full, free = Answers(START, END), Answers(START, END)
    await cluster.add(full, cap=0)
    assert await cluster.stream() == [START, END]
    assert cluster.handle.num_calls == 1  # Ray Serve's handle waits for room.

    await cluster.add(free)
    for _ in range(4):
        assert await cluster.stream() == [START, END]
    assert (full.num_calls, free.num_calls, cluster.handle.num_calls) == (0, 4, 1)


async def test_the_handle_finds_out_whether_a_replica_is_gone(cluster: Cluster) -> None:
    await cluster.add(Answers(START, END))
    assert await cluster.stream() == [START, END]
    await cluster.listeners[0].close()

    assert await cluster.stream() == [START, END]
    assert (cluster.handle.num_calls, cluster.router.capacity) == (1, 1)


@pytest.mark.parametrize(
    "error",
    [ConnectionRefusedError("rejected"), TimeoutError("dropped"), OSError("no route to host")],
)
async def test_an_address_that_fails_is_tried_again_later_and_its_replica_stays(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    answers = Answers(START, END)
    await cluster.add(answers)
    tries = []

    async def fail(*_: Any, **__: Any) -> None:
        tries.append(cluster.now_s)
        raise error

    with monkeypatch.context() as firewall:
        firewall.setattr(asyncio, "open_connection", fail)
        for now_s in (0.0, 0.9, 1.0, 2.9, 3.0):
            cluster.now_s = now_s
            assert await cluster.stream() == [START, END]
    assert tries == [0.0, 1.0, 3.0]
    assert (answers.num_calls, cluster.handle.num_calls) == (0, 5)
    assert (cluster.calls.num_unreachable, cluster.router.capacity) == (1, 1)

    cluster.now_s = 7.0
    for _ in range(2):
        assert await cluster.stream() == [START, END]
    assert (answers.num_calls, cluster.handle.num_calls) == (2, 5)
    assert (cluster.calls.num_unreachable, cluster.router.capacity) == (0, 1)


async def test_attempts_at_the_same_time_count_as_one_failure(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers(START, END)
    await cluster.add(answers)
    rejects, num_tries = asyncio.Event(), 0

    async def fail(*_: Any, **__: Any) -> None:
        nonlocal num_tries
        num_tries += 1
        await rejects.wait()
        raise ConnectionRefusedError

    with monkeypatch.context() as firewall:
        firewall.setattr(asyncio, "open_connection", fail)
        requests = [replace(REQUEST, terms=RequestTerms(str(number))) for number in range(8)]
        streams = [asyncio.create_task(cluster.stream(request)) for request in requests]
        while num_tries < len(streams):  # noqa: ASYNC110
            await asyncio.sleep(0)
        rejects.set()
        await asyncio.gather(*streams)

    assert len(caplog.records) == 1
    cluster.now_s = 1.0
    assert await cluster.stream() == [START, END]
    assert (answers.num_calls, cluster.handle.num_calls) == (1, 8)


async def test_only_one_request_waits_while_an_address_is_tried_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.add(Answers(START, END))
    rejects, hangs = ConnectionRefusedError("rejected"), asyncio.Event()

    async def fail(*_: Any, **__: Any) -> None:
        if cluster.now_s:
            await hangs.wait()
        raise rejects

    monkeypatch.setattr(asyncio, "open_connection", fail)
    assert await cluster.stream() == [START, END]
    cluster.now_s = 1.0
    first = asyncio.create_task(cluster.stream())
    await asyncio.sleep(0)

    assert await cluster.stream(replace(REQUEST, terms=RequestTerms("other"))) == [START, END]
    assert not first.done()
    hangs.set()
    assert await first == [START, END]


SOMAXCONN = int(Path("/proc/sys/net/core/somaxconn").read_text())


async def test_a_burst_of_connections_waits_until_the_replica_accepts_them(
    cluster: Cluster,
) -> None:
    host, port, _ = await cluster.add(Answers(START, END))

    # The event loop accepts none of them meanwhile.
    burst = [socket.create_connection((host, port), timeout=60) for _ in range(min(400, SOMAXCONN))]

    for each in burst:
        each.close()


async def test_a_lost_connection_is_a_lost_replica(cluster: Cluster) -> None:
    await cluster.add(Answers(START, END, holds=True))
    async with aclosing(cluster.calls.stream(REQUEST)) as parts:
        assert await anext(parts) == START
        for task in cluster.listeners[0]._connections:
            task.cancel()
        with pytest.raises(ReplicaLostError, match="connection") as raised:
            await anext(parts)
    assert raised.value.replica == "r0"


async def test_a_broken_answer_names_the_replica(cluster: Cluster) -> None:
    await cluster.add(Answers(START, ResponseBroken("died", engine_died=True)))

    with pytest.raises(ReplicaBrokenError) as raised:
        await cluster.stream()
    assert (raised.value.engine_died, raised.value.replica) == (True, "r0")
    with pytest.raises(ReplicaBrokenError):
        await cluster.calls.whole(REQUEST)


async def test_a_replica_that_does_not_answer_in_time(cluster: Cluster) -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    cluster.know(Address("127.0.0.1", silent.sockets[0].getsockname()[1], "00" * 32))

    with pytest.raises(NoReplicaError, match=r"within 0\.2 s"):
        await cluster.stream(replace(REQUEST, replica_wait_s=0.2))
    silent.close()


async def test_only_a_gateway_with_the_token_is_served(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers(START, END)
    address = await cluster.add(answers)
    for _ in range(3):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"0" * 32 + b"\x00\x00\x00\x10" + frame(Call("whole", REQUEST)))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()

    assert answers.num_calls == 0
    # Whoever reaches the port cannot fill the log.
    assert [record.message for record in caplog.records] == [
        "refused a connection that is not a gateway's"
    ]


async def test_a_process_at_the_port_of_a_dead_replica_gets_neither_token_nor_prompt(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rogue = RoguePeer(tmp_path / "ran")
    address = Address("127.0.0.1", await rogue.start("127.0.0.1"), "5a" * 32)
    cluster.know(address)
    live = Answers(START, END)
    await cluster.add(live)
    request = replace(REQUEST, body=b"a secret prompt")
    live.expected = request

    for _ in range(4):
        assert await cluster.stream(request) == [START, END]

    assert live.num_calls + cluster.handle.num_calls == 4
    # One connection, because the address is not tried again soon; on it only a nonce.
    assert [len(received) for received in rogue.received] == [40]
    assert bytes.fromhex(address.token) not in rogue.received[0]
    assert not rogue.file.exists()
    assert (cluster.router.capacity, cluster.calls.num_unreachable) == (2, 1)
    first, second = caplog.records
    assert first.message.startswith("another process listens at a replica's address")
    assert second.message.startswith("no own connection to a replica")
    rogue.close()


async def test_a_replica_of_another_version_is_called_over_the_handle(cluster: Cluster) -> None:
    cluster.know(Address("127.0.0.1", 1, "00" * 32), protocol=3)

    assert await cluster.stream() == [START, END]
    assert (cluster.handle.num_calls, cluster.router.capacity) == (1, 1)


@pytest.mark.parametrize("begins", [False, True])
async def test_a_replica_that_sends_something_unexpected_is_lost(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, begins: bool
) -> None:
    token = bytes(32)
    too_long = frame(Piece(b""))[:1] + struct.pack(">I", 2**31)

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await admit_gateway(reader, writer, token)
        writer.write((frame(Reply.ACCEPTED) + frame(START) if begins else b"") + too_long)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(broken, "127.0.0.1", 0)
    cluster.know(Address("127.0.0.1", server.sockets[0].getsockname()[1], token.hex()))
    if begins:
        with pytest.raises(ReplicaLostError, match="2147483648 bytes, more than"):
            await cluster.stream()
    else:
        assert await cluster.stream() == [START, END]
        assert cluster.handle.num_calls == 1

    record = caplog.records[0]
    assert record.levelno == logging.ERROR
    assert record.message == "unexpected data from a replica; its connection is closed"
    server.close()


async def test_a_call_may_be_as_long_as_the_present_limit_on_bodies(cluster: Cluster) -> None:
    answers = Answers(START, END)
    await cluster.add(answers)
    for num_bytes in (1_000, 20_000_000, 1_000):
        answers.expected = replace(REQUEST, body=b"x" * num_bytes)
        cluster.max_body_bytes = num_bytes
        assert await cluster.stream(answers.expected) == [START, END]

    assert (answers.num_calls, cluster.handle.num_calls) == (3, 0)
    # Ray Serve's handle has a limit of its own, with an error that names it.
    cluster.max_body_bytes = 1000
    cluster.calls.close()
    assert await cluster.stream(replace(REQUEST, body=b"x" * 20_000_000)) == [START, END]
    assert (answers.num_calls, cluster.handle.num_calls) == (3, 1)


async def test_a_replica_closes_a_connection_with_a_call_over_the_limit(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers(START, END)
    address = await cluster.add(answers)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    await greet_replica(reader, writer, bytes.fromhex(address.token), 50)
    writer.write(frame(Call("whole", REQUEST)))

    assert await asyncio.wait_for(reader.read(), 60) == b""
    assert answers.num_calls == 0
    [record] = caplog.records
    assert record.message == "unexpected data from a gateway; its connection is closed"
    writer.close()


async def test_a_replica_that_shuts_down_lets_its_calls_end(cluster: Cluster) -> None:
    answers = Answers(START, END, holds=True)
    address = await cluster.add(answers)
    async with aclosing(cluster.calls.stream(REQUEST)) as parts:
        assert await anext(parts) == START
        idle = await asyncio.open_connection(address.host, address.port)
        await greet_replica(*idle, bytes.fromhex(address.token), 10_000)
        async with asyncio.timeout(60):
            while len(cluster.listeners[0]._connections) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        closing = asyncio.create_task(cluster.listeners[0].close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        reader, writer = idle
        writer.write(frame(Call("stream", REQUEST)))
        assert await read_reply(reader) is Reply.FULL
        answers.released.set()
        assert [part async for part in parts] == [END]
        await asyncio.wait_for(closing, 60)


async def test_a_replica_that_shuts_down_waits_until_its_answers_are_sent(cluster: Cluster) -> None:
    # More than the buffers of both ends hold.
    body = b"x" * 20_000_000
    address = await cluster.add(Answers((ResponseStart(200, [], body), END)))
    reader, writer = await asyncio.open_connection(address.host, address.port)
    await greet_replica(reader, writer, bytes.fromhex(address.token), 10_000)
    writer.write(frame(Call("whole", REQUEST)))
    assert await read_reply(reader) is Reply.ACCEPTED

    closing = asyncio.create_task(cluster.listeners[0].close())
    done, _ = await asyncio.wait([closing], timeout=0.3)
    assert not done
    parts: list[Any] = [await read_part(reader)]
    while parts[-1] != END:
        parts.append(await read_part(reader))
    assert b"".join(part.body for part in parts[:-1]) == body
    await closing
    writer.close()
