"""An OpenAI-compatible server on a real port that streams what a script says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from aiohttp import web

MODEL = "scripted"


@dataclass(frozen=True)
class Reply:
    """What one request gets. `pieces` are sent `gap_s` apart, the first after `first_s`.

    `may_write` is asked, with the number of pieces so far, until the next one or the end may go.
    Nothing is sent before as many requests as `together` have been under way at once.
    The connection is free again `linger_s` after the end.
    `ending`: a whole answer; a connection cut in the midst; a stream that ends without its end; an
    error within the stream; or nothing more for ever.
    """

    pieces: tuple[str, ...] = ("Hello", " there")
    together: int = 0
    first_s: float = 0.0
    gap_s: float = 0.0
    may_write: Callable[[int], bool] = lambda num_pieces: True
    linger_s: float = 0.0
    ending: Literal["done", "cut", "unfinished", "error", "hang"] = "done"
    status: int = 200
    body: str | None = None
    tokens: int | None = None
    usage: bool = True
    apar: dict[str, Any] | None = None


Script = Callable[[dict[str, Any], int], Reply]


@dataclass
class ChatServer:
    """Address of the server, its requests by connection, and the peak of concurrent requests."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    models: tuple[dict[str, Any], ...] = ({"id": MODEL},)
    connections: set[object] = field(default_factory=set)
    under_way: int = 0
    most_under_way: int = 0


@contextmanager
def chat_server(script: Script, **fields: Any) -> Iterator[ChatServer]:
    """Serve the script on a free local port, in an event loop of its own."""
    seen = ChatServer(**fields)
    ready, loop = threading.Event(), asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", partial(_models, seen))
        app.router.add_get("/version", _version)
        app.router.add_post("/v1/chat/completions", partial(_counted, seen, script))
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        seen.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await ended.wait()
        await runner.cleanup()

    executor = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    executor.start()
    assert ready.wait(60)
    try:
        yield seen
    finally:
        loop.call_soon_threadsafe(ended.set)
        executor.join(10)


async def _models(seen: ChatServer, request: web.Request) -> web.Response:
    if request.headers.get("Authorization") == "Bearer wrong":
        return web.json_response({"error": {"message": "no such key"}}, status=401)
    return web.json_response({"object": "list", "data": list(seen.models)})


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": "0.32.1"})


async def _counted(seen: ChatServer, script: Script, request: web.Request) -> web.StreamResponse:
    body = await request.json()
    seen.bodies.append(body)
    seen.keys.append(request.headers.get("Authorization"))
    seen.connections.add(request.transport)
    seen.under_way += 1
    seen.most_under_way = max(seen.most_under_way, seen.under_way)
    try:
        reply = script(body, len(seen.bodies) - 1)
        while seen.most_under_way < reply.together:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return await _answer(reply, request)
    finally:
        seen.under_way -= 1


async def _answer(reply: Reply, request: web.Request) -> web.StreamResponse:
    if reply.body is not None:
        return web.Response(text=reply.body, status=reply.status)
    if reply.status != 200:
        return web.json_response({"error": {"message": "scripted"}}, status=reply.status)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await asyncio.sleep(reply.first_s)
    for number, piece in enumerate(reply.pieces):
        if number:
            await asyncio.sleep(reply.gap_s)
        await _permission(reply, number)
        await response.write(_event({"choices": [{"index": 0, "delta": {"content": piece}}]}))
    if reply.ending == "hang":
        await asyncio.sleep(3600)
    if reply.ending == "cut":
        assert request.transport is not None
        request.transport.close()
    elif reply.ending == "error":
        await response.write(_event({"error": {"message": "the engine died"}}))
    elif reply.ending == "done":
        await _permission(reply, len(reply.pieces))
        await response.write(_end(reply))
        await asyncio.sleep(reply.linger_s)
    return response


async def _permission(reply: Reply, num_pieces: int) -> None:
    while not reply.may_write(num_pieces):  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def _end(reply: Reply) -> bytes:
    finish = _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    last: dict[str, Any] = {"choices": []}
    if reply.usage:
        tokens = len(reply.pieces) if reply.tokens is None else reply.tokens
        last["usage"] = {"prompt_tokens": 7, "completion_tokens": tokens}
    if reply.apar is not None:
        last["apar"] = reply.apar
    return finish + _event(last) + b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
