"""Draining: running requests finish or end with an error, new ones are refused."""

import asyncio
import json
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from deployments.app.ingress import DrainMiddleware

EVENTS = [(b"content-type", b"text/event-stream")]


class Application:
    """Sends a start and a piece, if asked to, and waits before it ends."""

    def __init__(self, start: bool = True, piece: bytes = b"data: 1\n\n") -> None:
        self.may_end = asyncio.Event()
        self.entered = asyncio.Event()
        self._start = start
        self._piece = piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._start:
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            await send({"type": "http.response.body", "body": self._piece, "more_body": True})
        self.entered.set()
        await self.may_end.wait()
        if not self._start:
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await send({"type": "http.response.body", "body": b"end", "more_body": False})


class Request:
    """One request to a drain, in its own task."""

    def __init__(
        self, drain: DrainMiddleware, application: Application, path: str = "/v1/x"
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self._application = application
        scope = {"type": "http", "path": path, "method": "GET", "headers": []}
        self.task = asyncio.create_task(drain(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def inside(self) -> "Request":
        await self._application.entered.wait()
        return self

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def test_when_closed_it_refuses_new_requests_and_lets_the_others_finish() -> None:
    application = Application()
    drain = DrainMiddleware(application)
    request = await Request(drain, application).inside()
    drain.close()
    transport = httpx.ASGITransport(app=drain)
    async with httpx.AsyncClient(transport=transport, base_url="http://drain") as client:
        refused = await client.get("/v1/x")
        health = await client.get("/health")
        live = await client.get("/live")

    assert drain.inside == 1
    application.may_end.set()
    await request.task

    assert (refused.status_code, health.status_code, live.status_code) == (503, 503, 200)
    assert refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) > 0
    assert request.body == b"data: 1\n\nend"
    assert drain.inside == 0


async def test_a_cut_request_ends_with_an_error_that_fits_what_was_sent() -> None:
    cases = {
        "unbegun": Application(start=False),
        "event": Application(),
        "half": Application(piece=b"data: 1"),
    }
    drains = {name: DrainMiddleware(application) for name, application in cases.items()}
    requests = {name: await Request(drains[name], cases[name]).inside() for name in cases}

    assert [drain.cut() for drain in drains.values()] == [1, 1, 1]
    await asyncio.gather(*(request.task for request in requests.values()))

    assert requests["unbegun"].sent[0]["status"] == 503
    assert json.loads(requests["unbegun"].body)["error"]["code"] == "draining"
    assert requests["event"].body.startswith(b'data: 1\n\ndata: {"error"')
    assert requests["half"].body.startswith(b'data: 1\n\ndata: {"error"')
    for name in ("event", "half"):
        assert requests[name].body.endswith(b"\n\ndata: [DONE]\n\n")
        assert requests[name].sent[-1]["more_body"] is False
    assert [drain.inside for drain in drains.values()] == [0, 0, 0]


async def test_a_disconnect_is_not_a_cut() -> None:
    application = Application()
    drain = DrainMiddleware(application)
    request = await Request(drain, application).inside()

    request.task.cancel()
    results = await asyncio.gather(request.task, return_exceptions=True)

    assert isinstance(results[0], asyncio.CancelledError)
    assert request.body == b"data: 1\n\n"
    assert drain.inside == 0
