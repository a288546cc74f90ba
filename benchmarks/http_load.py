"""A light closed-loop HTTP client: bare asyncio streams, because the client shares the cores."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

_DONE = b"data: [DONE]"


@dataclass(frozen=True)
class Answer:
    """What one request took, in seconds; `num_events` counts server-sent events."""

    latency_s: float
    first_byte_s: float
    num_events: int


@dataclass(frozen=True)
class LoadResult:
    """One closed-loop run."""

    wall_s: float
    answers: list[Answer]


@dataclass(frozen=True)
class Endpoint:
    """A server on this machine: where it listens, below which path, and the API key it asks for."""

    port: int
    prefix: str = ""
    key: str | None = None


def request_bytes(endpoint: Endpoint, body: dict[str, Any]) -> bytes:
    """A POST to chat completions, written out once."""
    payload = json.dumps(body).encode()
    authorization = f"Authorization: Bearer {endpoint.key}\r\n" if endpoint.key else ""
    head = (
        f"POST {endpoint.prefix}/v1/chat/completions HTTP/1.1\r\n"
        f"Host: 127.0.0.1:{endpoint.port}\r\n{authorization}"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> Answer:
    started = time.perf_counter()
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    first_byte_s = time.perf_counter() - started
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(head.decode(errors="replace"))
    lowered = head.lower()
    if b"content-length:" in lowered:
        length = int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        return Answer(time.perf_counter() - started, first_byte_s, body.count(b"data: "))
    num_events = 0
    tail = b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        piece = await reader.read(65536)
        if not piece:
            raise RuntimeError("the stream was cut off")
        num_events += piece.count(b"data: ")
        tail = (tail + piece)[-64:]
    if _DONE not in tail:
        raise RuntimeError("the stream ended without [DONE]")
    return Answer(time.perf_counter() - started, first_byte_s, num_events)


async def _client(port: int, requests: list[bytes]) -> list[Answer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return [await _exchange(reader, writer, request) for request in requests]
    finally:
        writer.close()


async def run_load(
    endpoint: Endpoint, *, num_clients: int, requests_each: int, num_tokens: int, streaming: bool
) -> LoadResult:
    """`num_clients` clients, each sending its next request when the last one is answered."""
    base = {
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": streaming,
    }
    plans = [
        [
            request_bytes(
                endpoint,
                base | {"messages": [{"role": "user", "content": f"Number {client} of {turn}?"}]},
            )
            for turn in range(requests_each)
        ]
        for client in range(num_clients)
    ]
    started = time.perf_counter()
    answers = await asyncio.gather(*(_client(endpoint.port, plan) for plan in plans))
    wall_s = time.perf_counter() - started
    return LoadResult(wall_s, [answer for plan in answers for answer in plan])
