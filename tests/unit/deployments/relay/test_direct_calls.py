"""Calls over real connections, to replicas that answer without an engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from apar_core.journal import ThreadDelta
from cluster.config.routing import RoutingSettings
from deployments.relay.direct_calls import DirectCalls
from deployments.relay.relay import Progress
from deployments.replica.listener import Listener
from deployments.routing.shared_router import ROUTERS, SharedRouter
from deployments.wire.answer import AnswerBroken, AnswerEnd, AnswerStart, Piece
from deployments.wire.errors import NoReplicaError, ReplicaBrokenError, ReplicaLostError
from deployments.wire.frames import ACCEPTED, FULL, Address, Call, read_frame, write_frame
from deployments.wire.load import ReplicaLoad
from deployments.wire.request import RelayedRequest, RequestTerms

REQUEST = RelayedRequest(
    "POST", "/v1/completions", b"", [], b"{}", RequestTerms("r"), replica_wait_s=60
)
START, END = AnswerStart(200, [], b"data: 1\n\n"), AnswerEnd(3, 4, 1, 0, 4)
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

    async def stream(self, request: RelayedRequest) -> AsyncIterator[Any]:
        assert request == REQUEST
        self.num_calls += 1
        self.num_inside += 1
        try:
            for part in self.parts[:-1]:
                yield part.to_wire() if isinstance(part, Piece) else part
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
    ) -> tuple[AnswerStart, AnswerEnd]:
        self.num_calls += 1
        return START, END


class Cluster:
    """Replicas `r0`, `r1`, ... of a deployment, and the calls to them."""

    def __init__(self) -> None:
        self.handle = Handle()
        self.router = SharedRouter(RoutingSettings(), seed=1)
        self.calls: Any = DirectCalls("direct", self.handle)  # type: ignore[arg-type]
        self.listeners: list[Listener] = []
        self.caps: dict[str, int] = {}

    async def add(self, answers: Answers, cap: int = 8) -> Address:
        listener = Listener(answers, lambda: cap)
        address = await listener.start("127.0.0.1")
        name = f"r{len(self.listeners)}"
        self.listeners.append(listener)
        self.caps[name] = 8
        self.router.replicas_changed(self, dict(self.caps))
        load = ReplicaLoad(0, 0, 0, 9, 9, 16, 1.0, 1.0, 0.0, address=address.as_text())
        self.router.reported(name, load)
        return address

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


async def test_a_stream_arrives_as_it_was_sent_over_one_connection(cluster: Cluster) -> None:
    await cluster.add(Answers(START, *PIECES, END))

    for _ in range(300):
        assert await cluster.stream() == [START, *PIECES, END]

    assert len(cluster.listeners[0]._connections) == 1
    assert cluster.handle.num_calls == 0


async def test_a_whole_answer_reports_its_progress(cluster: Cluster) -> None:
    await cluster.add(Answers(2, 5, (START, END)))
    counts: list[int] = []

    assert await cluster.calls.whole(REQUEST, counts.append) == (START, END)
    assert counts == [2, 5]


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


async def test_a_replica_that_is_gone_is_no_longer_chosen(cluster: Cluster) -> None:
    await cluster.add(Answers(START, END))
    assert await cluster.stream() == [START, END]
    await cluster.listeners[0].close()

    assert await cluster.stream() == [START, END]
    assert (cluster.handle.num_calls, cluster.router.capacity) == (1, 0)


async def test_a_lost_connection_is_a_lost_replica(cluster: Cluster) -> None:
    await cluster.add(Answers(START, END, holds=True))
    async with aclosing(cluster.calls.stream(REQUEST)) as parts:
        assert await anext(parts) == START
        for task in cluster.listeners[0]._connections:
            task.cancel()
        with pytest.raises(ReplicaLostError, match="connection"):
            await anext(parts)


async def test_a_broken_answer_names_the_replica(cluster: Cluster) -> None:
    await cluster.add(Answers(START, AnswerBroken("died", engine_died=True)))

    with pytest.raises(ReplicaBrokenError) as raised:
        await cluster.stream()
    assert (raised.value.engine_died, raised.value.replica) == (True, "r0")
    with pytest.raises(ReplicaBrokenError):
        await cluster.calls.whole(REQUEST)


async def test_a_replica_that_does_not_answer_in_time(cluster: Cluster) -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    address = Address("127.0.0.1", silent.sockets[0].getsockname()[1], "00" * 32)
    cluster.router.replicas_changed(cluster, {"r0": 8})
    load = ReplicaLoad(0, 0, 0, 9, 9, 16, 1.0, 1.0, 0.0, address=address.as_text())
    cluster.router.reported("r0", load)

    with pytest.raises(NoReplicaError, match=r"within 0\.2 s"):
        await cluster.stream(replace(REQUEST, replica_wait_s=0.2))
    silent.close()


async def test_only_a_gateway_with_the_token_is_served(cluster: Cluster) -> None:
    answers = Answers(START, END)
    address = await cluster.add(answers)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"0" * 32 + b"\x00\x00\x00\x01.")

    assert await asyncio.wait_for(reader.read(), 60) == b""
    assert answers.num_calls == 0
    writer.close()


async def test_a_replica_that_shuts_down_lets_its_calls_end(cluster: Cluster) -> None:
    answers = Answers(START, END, holds=True)
    address = await cluster.add(answers)
    async with aclosing(cluster.calls.stream(REQUEST)) as parts:
        assert await anext(parts) == START
        idle = await asyncio.open_connection(address.host, address.port)
        idle[1].write(bytes.fromhex(address.token))
        async with asyncio.timeout(60):
            while len(cluster.listeners[0]._connections) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        closing = asyncio.create_task(cluster.listeners[0].close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        reader, writer = idle
        write_frame(writer, Call("stream", REQUEST))
        assert await read_frame(reader) == FULL
        answers.released.set()
        assert [part async for part in parts] == [END]
        await asyncio.wait_for(closing, 60)


async def test_a_replica_that_shuts_down_waits_until_its_answers_are_sent(cluster: Cluster) -> None:
    # More than the buffers of both ends hold.
    body = b"x" * 20_000_000
    address = await cluster.add(Answers((AnswerStart(200, [], body), END)))
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(bytes.fromhex(address.token))
    write_frame(writer, Call("whole", REQUEST))
    assert await read_frame(reader) == ACCEPTED

    closing = asyncio.create_task(cluster.listeners[0].close())
    done, _ = await asyncio.wait([closing], timeout=0.3)
    assert not done
    assert await read_frame(reader) == (AnswerStart(200, [], body), END)
    assert await read_frame(reader) is None
    await closing
    writer.close()
