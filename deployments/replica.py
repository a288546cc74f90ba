"""One engine and vLLM's HTTP application in one Ray Serve replica."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat
from ray import serve

from apar_core.errors import EngineError
from cluster.logging_config import LoggingConfig
from deployments.answer_parts import AnswerBroken, AnswerPart, AnswerStart, WholeAnswer
from deployments.apar_extension import AparExtension
from deployments.asgi_relay import AsgiApp, RelayedRequest, relay
from deployments.autoscaling import replica_report
from deployments.json_logs import ProcessLogs
from deployments.routing.load_report import LoadReporter
from deployments.serve_logs import kept_serve_logs
from deployments.served_request import FollowedRequest
from deployments.watchdog import watch

logger = logging.getLogger(__name__)

# A step on a CPU may take seconds, but not this long; under Ray Serve's own limit of 30 s.
ENGINE_ANSWER_S = 25.0


class ReplicaSettings(BaseModel):
    """What a replica serves and how it sends on its streams."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    served_name: str
    engine: dict[str, Any]
    coalesce_s: NonNegativeFloat
    logging: LoggingConfig = LoggingConfig()


class Replica:
    """Runs requests through vLLM's application in process; the gateway is its only caller."""

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc] # Ray Serve awaits it.
        # vLLM takes seconds to import; the process that composes the application need not.
        with kept_serve_logs():
            from deployments.engine_factory import (
                build_engine,
                build_http_application,
                server_arguments,
            )

        name = settings.served_name.replace("/", "-")
        self._logs = ProcessLogs(settings.logging, f"replica-{name}")
        args = server_arguments(settings.model, settings.served_name, settings.engine)
        self._engine = build_engine(args)
        self._engine.pace_streams(settings.coalesce_s)
        tokens = self._engine.control_tokens
        self._app: AsgiApp = AparExtension(
            await build_http_application(self._engine, args),
            control_token_ids=frozenset(tokens.texts if tokens else ()),
            take_statistics=self._take_statistics,
        )
        self._reporter = LoadReporter(self._engine.vllm_config.cache_config.block_size)
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._watchdog = asyncio.create_task(watch(lambda: self._engine.errored))

    def _take_statistics(self, request_id: str) -> Mapping[str, Any] | None:
        record = self._engine.take_statistics(request_id)
        return None if record is None else asdict(record.statistics)

    async def stream(self, request: RelayedRequest) -> AsyncIterator[AnswerPart]:
        """The answer, piece by piece."""
        served = FollowedRequest(self._engine, request.terms)
        begun = False
        async with aclosing(self._answer(request, served)) as parts:
            async for part in parts:
                begun = True
                if isinstance(part, AnswerStart):
                    yield served.start(part)
                else:
                    yield served.piece(part).to_wire()
        broken = self._broken()
        if broken is not None and begun:
            # What has been generated since the last piece need not be generated again.
            yield served.piece(b"").to_wire()
        yield broken or served.signed_end(self._replica_id)

    async def whole(self, request: RelayedRequest) -> AsyncIterator[WholeAnswer]:
        """The answer in one piece, and what it has cost."""
        served = FollowedRequest(self._engine, request.terms)
        pieces: list[bytes] = []
        start = AnswerStart(500, [], b"")
        async with aclosing(self._answer(request, served)) as parts:
            async for part in parts:
                if isinstance(part, AnswerStart):
                    start = part
                    pieces.append(part.body)
                else:
                    pieces.append(part)
        answer = AnswerStart(start.status, start.headers, b"".join(pieces))
        yield self._broken() or (answer, served.signed_end(self._replica_id))

    async def _answer(
        self, request: RelayedRequest, served: FollowedRequest
    ) -> AsyncGenerator[AnswerStart | bytes, None]:
        """What the application answers, up to where the engine dies.

        After that, vLLM answers with errors, in whatever form, though nothing is wrong with the
        request.
        """
        if self._engine.errored:
            # The watchdog is about to end this process, and Ray Serve then knows that it is gone.
            # A replica that refused at once would look idle, and draw every retry.
            await asyncio.sleep(ENGINE_ANSWER_S)
        try:
            async with aclosing(relay(self._app, request, served)) as parts:
                async for part in parts:
                    if self._engine.errored:
                        return
                    yield part
        except Exception:
            if not self._engine.errored:
                raise
        finally:
            served.close()

    def _broken(self) -> AnswerBroken | None:
        """Why the replica cannot go on with its answers; None while it can."""
        return AnswerBroken("the engine has died") if self._engine.errored else None

    async def record_routing_stats(self) -> dict[str, Any]:
        """What routers choose by; Ray Serve asks for it and hands it on to them."""
        return asdict(self._reporter.report(await self._engine.core_state(), time.time()))

    async def load(self) -> dict[str, Any]:
        """Requests and threads alive, KV blocks in all and free, at this moment.

        `requests_inside` counts what the HTTP side holds, the rest comes from the engine core.
        """
        return {"requests_inside": self._engine.get_num_unfinished_requests()} | (
            await self._engine.core_state()
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray Serve's autoscaling: what this replica carries."""
        requests = self._engine.get_num_unfinished_requests()
        return replica_report(await self._engine.core_state(), requests)

    async def check_health(self) -> None:
        """Ray Serve's health check; raises when the engine is dead or does not answer."""
        if self._engine.errored:
            raise EngineError("the engine process has died")
        try:
            await asyncio.wait_for(self._engine.core_state(), ENGINE_ANSWER_S)
        except TimeoutError as error:
            raise EngineError(f"the engine did not answer within {ENGINE_ANSWER_S} s") from error

    async def __del__(self) -> None:
        self._watchdog.cancel()
        self._engine.shutdown()
