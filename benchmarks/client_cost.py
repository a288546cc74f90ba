"""What a client of streams costs: CPU time for each event, by the library that reads them.

    python -m benchmarks.client_cost

A server in a process of its own sends events of 300 bytes at a pace, over many streams at once.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any

import httpx
import uvloop
from aiohttp import web

from apar_core.offline.data.records import ChatMessage
from benchmarks.http_load import Endpoint, run_load
from cluster.loadtest.client import LoadClient
from cluster.loadtest.jobs import Job
from cluster.loadtest.target import Target

NUM_STREAMS = 64
NUM_EVENTS = 200
GAP_S = 0.02
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000'
    b',"model":"apar-tiny","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":null}],"prompt_token_ids":null,"system_fingerprint":null}\n\n'
)


def main() -> None:
    """Measure every client against the same server, and print JSON lines."""
    ours, theirs = mp.Pipe()
    context = mp.get_context("spawn")
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        port = ours.recv()
        for name, (client, loop_factory) in CLIENTS.items():
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(client(port))
                cpu_s, wall_s = time.process_time(), time.perf_counter()
                runner.run(client(port))
            used_s = time.process_time() - cpu_s
            share = used_s / (time.perf_counter() - wall_s)
            events = NUM_STREAMS * NUM_EVENTS
            print(
                json.dumps(
                    {
                        "client": name,
                        "cpu_us_per_event": round(used_s / events * 1e6, 1),
                        "cpu_share": round(share, 2),
                    }
                )
            )
    finally:
        server.terminate()


async def _apar(port: int) -> None:
    job = Job("0", "other", (ChatMessage("user", "?"),), b"{}")
    async with LoadClient(Target(url=f"127.0.0.1:{port}"), timeout_s=60) as client:
        answers = await asyncio.gather(
            *(
                client.send(job, repeat=0, index=index, start_s=0.0, planned_s=None)
                for index in range(NUM_STREAMS)
            )
        )
    assert all(len(answer.record.pieces) == NUM_EVENTS for answer in answers)


async def _httpx(port: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:

        async def ask() -> None:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            async with client.stream("POST", url, json={}) as answer:
                events = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
            assert [json.loads(event[6:]) for event in events][NUM_EVENTS - 1]

        await asyncio.gather(*(ask() for _ in range(NUM_STREAMS)))


async def _bare(port: int) -> None:
    """Bare asyncio streams that only count events, the least there can be."""
    result = await run_load(
        Endpoint(port), num_clients=NUM_STREAMS, requests_each=1, num_tokens=1, streaming=True
    )
    assert all(answer.num_events == NUM_EVENTS + 1 for answer in result.answers)


Client = Callable[[int], Coroutine[Any, Any, None]]
LoopFactory = Callable[[], asyncio.AbstractEventLoop]

CLIENTS: dict[str, tuple[Client, LoopFactory]] = {
    "httpx, asyncio": (_httpx, asyncio.new_event_loop),
    "apar loadtest (aiohttp), asyncio": (_apar, asyncio.new_event_loop),
    "apar loadtest (aiohttp), uvloop": (_apar, uvloop.new_event_loop),
    "bare streams, asyncio": (_bare, asyncio.new_event_loop),
}


def _serve(port_to: Connection) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(NUM_EVENTS):
            await response.write(_EVENT)
            await asyncio.sleep(GAP_S)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", stream)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port_to.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    main()
