"""Replicas that are played, and a gateway in front of them."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from deployments.gateway.gateway import Gateway
from deployments.gateway.settings import GatewaySettings, ServedModel
from deployments.relay.relay import Progress
from deployments.wire.answer import AnswerEnd, AnswerStart, Piece
from deployments.wire.request import RelayedRequest

JSON = [(b"content-type", b"application/json"), (b"content-length", b"999")]
EVENTS = [(b"content-type", b"text/event-stream")]
CHAT = "/v1/chat/completions"


class PlayedReplicas:
    """Replicas that give set answers; an error among the parts is raised in its turn."""

    def __init__(
        self, *parts: AnswerStart | Piece | Exception, end: AnswerEnd | None = None
    ) -> None:
        self.parts = parts
        self.end = end or AnswerEnd()
        self.requests: list[RelayedRequest] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_closed = 0
        self.num_running = 1

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[AnswerStart | Piece | AnswerEnd, None]:
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
    ) -> tuple[AnswerStart, AnswerEnd]:
        async for part in self.stream(request):
            assert isinstance(part, AnswerStart)
            return part, self.end
        raise AssertionError("no answer is set")


def client(
    *replicas: PlayedReplicas, healthy: bool = True, max_queued: int = 0, **settings: Any
) -> httpx.AsyncClient:
    """A client of a gateway; the models of the replicas are called m, m1, m2 ..."""
    gateway = gateway_of(*replicas, healthy=healthy, max_queued=max_queued, **settings)
    transport = httpx.ASGITransport(app=gateway)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def settings_of(num_models: int, *, max_queued: int = 0, **settings: Any) -> GatewaySettings:
    """Settings for so many models; two requests run at once in each."""
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


def gateway_of(
    *replicas: PlayedReplicas, healthy: bool = True, max_queued: int = 0, **settings: Any
) -> Gateway:
    """A gateway before these replicas, each those of a model of its own."""

    async def is_healthy() -> bool:
        return healthy

    given = settings_of(len(replicas), max_queued=max_queued, **settings)
    return Gateway(given, replicas, is_healthy)
