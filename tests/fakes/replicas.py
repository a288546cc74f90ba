"""Fake replicas, and gateways and clients in front of them."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
from starlette.types import ASGIApp

from deployments.config.keys import KeyConfig, hash_of
from deployments.gateway.gateway import Gateway
from deployments.gateway.settings import GatewaySettings, ServedModel
from deployments.relay.relay import Progress
from deployments.wire.request import RelayedRequest
from deployments.wire.response import Piece, ResponseEnd, ResponseStart
from deployments.wire.start import StartReport

JSON = [(b"content-type", b"application/json"), (b"content-length", b"999")]
EVENTS = [(b"content-type", b"text/event-stream")]
CHAT = "/v1/chat/completions"


class FakeReplicas:
    """The replicas of a model, which all give the same answer; raises errors among its parts."""

    def __init__(
        self, *parts: ResponseStart | Piece | Exception, end: ResponseEnd | None = None
    ) -> None:
        self.parts = parts
        self.end = end or ResponseEnd()
        self.requests: list[RelayedRequest] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_closed = 0
        self.num_running = 1
        self.num_unreachable = 0
        self.num_answering: int | None = None  # None for all that run
        self.reports: list[StartReport] = []

    async def answering(self, wait_s: float) -> int:
        return self.num_running if self.num_answering is None else self.num_answering

    async def starting(self) -> list[StartReport]:
        return self.reports

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[ResponseStart | Piece | ResponseEnd, None]:
        self.requests.append(request)
        try:
            await self.gate.wait()
            for part in self.parts:
                if isinstance(part, Exception):
                    raise part
                yield part
            yield self.end
        finally:
            self.num_closed += 1

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[ResponseStart, ResponseEnd]:
        async for part in self.stream(request):
            assert isinstance(part, ResponseStart)
            return part, self.end
        raise AssertionError("no answer is set")


def answering(*, end: ResponseEnd | None = None) -> FakeReplicas:
    """Replicas that answer with an empty JSON object."""
    return FakeReplicas(ResponseStart(200, JSON, b"{}"), end=end)


def settings_of(num_models: int, *, max_queued: int = 0, **settings: Any) -> GatewaySettings:
    """Settings for models m, m1, m2 ... of which each runs two requests at once."""
    models = tuple(
        ServedModel(
            name=f"m{number or ''}",
            deployment=f"Replica-m{number or ''}",
            requests_per_replica=2,
            max_queued=max_queued,
        )
        for number in range(num_models)
    )
    return GatewaySettings(models=models, **settings)


def gateway_of(*replicas: FakeReplicas, max_queued: int = 0, **settings: Any) -> Gateway:
    """A gateway with one model for each of the replicas."""
    given = settings_of(len(replicas), max_queued=max_queued, **settings)
    return Gateway(given, replicas)


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    """A client of a gateway, or of another application."""
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def client(*replicas: FakeReplicas, max_queued: int = 0, **settings: Any) -> httpx.AsyncClient:
    """A client of a gateway in front of these replicas."""
    return client_of(gateway_of(*replicas, max_queued=max_queued, **settings))


def key(name: str, token: str | None = None, **fields: Any) -> KeyConfig:
    """A key; its token is its name unless given."""
    return KeyConfig.model_validate({"name": name, "hash": hash_of(token or name)} | fields)


def bearer(token: str) -> dict[str, str]:
    """The header of a key."""
    return {"authorization": f"Bearer {token}"}


async def settled(http: httpx.AsyncClient, *bodies: tuple[str, dict[str, Any]]) -> list[Any]:
    """Send requests of keys, each settled in the gateway before the next."""
    tasks = []
    ready: Any = vars(asyncio.get_running_loop())["_ready"]
    for name, body in bodies:
        tasks.append(asyncio.create_task(http.post(CHAT, json=body, headers=bearer(name))))
        await asyncio.sleep(0.01)
        # On a busy machine this time may end before the loop has run all that is ready.
        while ready:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0)
    return tasks
