"""The way of POST requests to the gateway past Ray Serve, behind a real uvicorn."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from deployments.client_headers import BYPASSES_SERVE, SHORTCUT, WithoutSteeringHeaders

BODY = b'{"a": 1}'


class Gateway:
    """Answers a request once it may, and notes how it ended."""

    def __init__(self, *, is_stream: bool = False) -> None:
        self._is_stream = is_stream
        self.may_answer = asyncio.Event()
        self.begun = asyncio.Event()
        self.entered = asyncio.Event()
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.scope: Scope = {}
        self.body = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        try:
            more = True
            while more:
                message = await receive()
                self.body += message["body"]
                self.begun.set()
                more = message["more_body"]
            self.entered.set()
            await self.may_answer.wait()
            length = [] if self._is_stream else [(b"content-length", b"5")]
            await send({"type": "http.response.start", "status": 200, "headers": length})
            await send({"type": "http.response.body", "body": b"whole", "more_body": False})
            # A disconnect that uvicorn reports after the end must not cancel what is left to do.
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            self.ended.put_nowait("cancelled")
            raise
        self.ended.put_nowait("complete")


async def _through_ray_serve(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 203, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def serving(gateway: Gateway | None) -> AsyncIterator[int]:
    """Serve on a port with the middleware in front; the shortcut leads to the gateway, if any."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = WithoutSteeringHeaders(_through_ray_serve)
    server = uvicorn.Server(uvicorn.Config(app, http="httptools", lifespan="off", log_level=60))
    if gateway is not None:
        SHORTCUT.open(gateway)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        SHORTCUT.close()
        server.should_exit = True
        await task


class Client:
    """A connection that has sent one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def asks(cls, port: int, *headers: str, method: str = "POST") -> "Client":
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        lines = [f"{method} /v1/x HTTP/1.1", "host: x", f"content-length: {len(BODY)}", *headers]
        writer.write("\r\n".join([*lines, "", ""]).encode() + BODY)
        return cls(reader, writer)

    async def packet(self) -> bytes:
        return await self._reader.read(10_000)

    def leave(self) -> None:
        self._writer.close()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_head_and_body_of_an_answer_arrive_in_one_packet(is_stream: bool) -> None:
    gateway = Gateway(is_stream=is_stream)
    gateway.may_answer.set()
    async with serving(gateway) as port:
        client = await Client.asks(port, "x-request-timeout-seconds: 0.01")
        packet = await client.packet()

        assert packet.startswith(b"HTTP/1.1 200")
        assert b"whole" in packet
        assert gateway.body == BODY
        assert await gateway.ended.get() == "complete"
        client.leave()
    headers = dict(gateway.scope["headers"])
    assert gateway.scope[BYPASSES_SERVE]
    assert len(headers[b"x-request-id"]) == 36
    assert b"x-request-timeout-seconds" not in headers


async def test_a_given_request_id_is_kept() -> None:
    gateway = Gateway()
    gateway.may_answer.set()
    async with serving(gateway) as port:
        client = await Client.asks(port, "x-request-id: mine")
        await client.packet()
        client.leave()

    ids = [value for name, value in gateway.scope["headers"] if name == b"x-request-id"]
    assert ids == [b"mine"]


async def test_a_client_that_leaves_cancels_its_request() -> None:
    gateway = Gateway()
    async with serving(gateway) as port:
        client = await Client.asks(port)
        await gateway.entered.wait()
        client.leave()

        assert await asyncio.wait_for(gateway.ended.get(), 30) == "cancelled"


async def test_a_client_that_leaves_within_its_body_cancels_its_request() -> None:
    gateway = Gateway()
    async with serving(gateway) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nbegin")
        await gateway.begun.wait()
        writer.close()

        assert await asyncio.wait_for(gateway.ended.get(), 30) == "cancelled"


async def test_the_server_waits_for_requests_when_it_stops() -> None:
    gateway = Gateway()
    async with serving(gateway) as port:
        client = await Client.asks(port)
        await gateway.entered.wait()
        asyncio.get_running_loop().call_later(0.1, gateway.may_answer.set)

    assert b"whole" in await client.packet()
    assert gateway.ended.get_nowait() == "complete"
    client.leave()


@pytest.mark.parametrize(("has_gateway", "method"), [(False, "POST"), (True, "GET"), (True, "PUT")])
async def test_other_requests_go_through_ray_serve(has_gateway: bool, method: str) -> None:
    async with serving(Gateway() if has_gateway else None) as port:
        client = await Client.asks(port, method=method)
        assert (await client.packet()).startswith(b"HTTP/1.1 203")
        client.leave()


async def test_a_head_without_a_body_is_sent_at_once() -> None:
    async def begin(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60)

    async with serving(None) as port:
        SHORTCUT.open(begin)
        client = await Client.asks(port)
        assert (await client.packet()).startswith(b"HTTP/1.1 200")
        client.leave()


async def test_an_error_behind_the_head_is_logged_and_ends_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("a reason")

    async with serving(None) as port:
        SHORTCUT.open(fail)
        client = await Client.asks(port)
        while await client.packet():
            pass
        client.leave()

    assert "a reason" in caplog.text


def test_the_shortcut_is_closed_in_other_event_loops() -> None:
    async def open_it() -> bool:
        SHORTCUT.open(Gateway())
        return SHORTCUT.is_open

    async def is_open() -> bool:
        return SHORTCUT.is_open

    with closing(SHORTCUT):
        assert asyncio.run(open_it())
        assert not asyncio.run(is_open())
