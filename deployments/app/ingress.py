"""The gateway as a Ray Serve deployment: its handles, its settings as they change, its end."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apar_core.errors import AparError
from cluster.config import ConfigError, problems_of
from cluster.config.routing import RoutingSettings
from cluster.logs import ProcessLogs
from deployments.app.autoscaling import gateway_report
from deployments.gateway.gateway import Gateway
from deployments.gateway.settings import GatewaySettings, in_place_settings
from deployments.metrics.gateway_metrics import GatewayMetrics
from deployments.metrics.ray_instruments import NoInstruments, RayInstruments
from deployments.metrics.timer import FlushTimer
from deployments.relay.relay import send_error, send_whole
from deployments.relay.replica_calls import HandleCalls
from deployments.routing import registry
from deployments.tracing import close_tracing
from deployments.wire.answer import AnswerStart
from deployments.wire.errors import JSON_TYPE, DrainingError, ErrorAnswer, answer_for

LIVE_PATH = "/live"
_EVENTS = b"text/event-stream"


class FrontDoor:
    """ASGI middleware: counts the requests inside, refuses new ones once it is closed."""

    def __init__(self, app: ASGIApp, refused: Callable[[], None] = lambda: None) -> None:
        """`refused` is told of each request that comes too late."""
        self._app = app
        self._refused = refused
        self._tasks: dict[asyncio.Task[object], bool] = {}
        self._closed = False

    @property
    def inside(self) -> int:
        """Requests let in and not yet answered."""
        return len(self._tasks)

    def close(self) -> None:
        """Let no further request in."""
        self._closed = True

    def cut(self) -> int:
        """End the requests that are still inside, each with an error; returns how many."""
        self.close()
        for task in self._tasks:
            self._tasks[task] = True
            task.cancel()
        return len(self._tasks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == LIVE_PATH:
            await send_whole(send, AnswerStart(HTTPStatus.OK, [JSON_TYPE], b'{"status":"ok"}'))
        elif self._closed:
            self._refused()
            await send_error(send, answer_for(DrainingError()))
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = False
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if not self._tasks[task]:
                raise
            task.uncancel()
            await answer.end_with(answer_for(DrainingError()))
        finally:
            del self._tasks[task]


class _Answer:
    """How far the answer to one request has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self._ended = False
        self._is_stream = False
        self._tail = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            headers = dict(message["headers"])
            self._is_stream = headers.get(b"content-type", b"").startswith(_EVENTS)
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
            self._tail = (self._tail + message.get("body", b""))[-2:]
        await self._send(message)

    async def end_with(self, error: ErrorAnswer) -> None:
        """The error in the place of what has not been sent; nothing where all has been."""
        if not self._started:
            await send_error(self._send, error)
        elif not self._ended:
            # The last event may have been cut in half; a line break ends it.
            events = (b"" if self._tail in (b"", b"\n\n") else b"\n\n") + error.events
            body = events if self._is_stream else b""
            await self._send({"type": "http.response.body", "body": body, "more_body": False})


logger = logging.getLogger(__name__)

APPLICATION = "apar"
GATEWAY = "Gateway"
# Where the whole settings stand in a `user_config` that no person has written.
_WHOLE = "settings"


class IngressSettings(BaseModel):
    """The gateway's settings, and the deployments of its models, in their order.

    `may_sleep` says that a model may have no replica because nobody asks for it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gateway: GatewaySettings
    deployments: tuple[str, ...]
    routing: RoutingSettings = RoutingSettings()
    may_sleep: bool = False

    def as_user_config(self) -> dict[str, Any]:
        """In the form that Ray Serve brings to running replicas, and shows: it has no secrets."""
        return {_WHOLE: self.model_dump(mode="json")}

    @classmethod
    def from_user_config(cls, config: dict[str, Any]) -> "IngressSettings":
        """What `as_user_config` was made of; raises ConfigError."""
        try:
            return cls.model_validate(config[_WHOLE])
        except ValidationError as error:
            raise ConfigError(f"user_config: {problems_of(error)}") from None

    def changed_by(self, config: dict[str, Any]) -> "IngressSettings":
        """These settings as a `user_config` changes them; raises ConfigError.

        One that `as_user_config` has made replaces them; a person's changes some.
        """
        if _WHOLE in config:
            return self.from_user_config(config)
        changes = in_place_settings(config)
        changed = {
            "gateway": changes.over(self.gateway),
            "routing": changes.routing or self.routing,
        }
        return self.model_copy(update=changed)


@serve.ingress()
class GatewayIngress:
    """The gateway behind its front door."""

    def __init__(self, built: IngressSettings, *replicas: DeploymentHandle[Any]) -> None:
        settings = built.gateway
        self._logs = ProcessLogs(settings.logging, "gateway")
        self._replicas = {handle.deployment_name: HandleCalls(handle) for handle in replicas}
        self._built = built
        # Routers begin with the default routing; the first `reconfigure` tells them another.
        self._settings = built.model_copy(update={"routing": RoutingSettings()})
        self._is_configured = False
        # Whether all of the settings are in force; else even the same are taken again.
        self._is_taken = True
        calls = [self._replicas[name] for name in self._settings.deployments]
        # Ray Serve's own middleware sends each request's id back, and makes one where none came.
        metrics = GatewayMetrics(RayInstruments() if settings.metrics else NoInstruments())
        self._gateway = Gateway(
            settings, calls, self._is_ready, sends_request_ids=False, metrics=metrics
        )
        self._door = FrontDoor(self._gateway, partial(metrics.rejected, DrainingError.reason))
        self._telling: FlushTimer | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._door

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new settings; requests that are inside keep what they began with.

        Ray Serve replaces a replica that raises here, and the new one would fail too. So a wrong
        `user_config` keeps a gateway from starting, and is only logged by one that serves already.
        """
        try:
            settings = self._built.changed_by(user_config)
            await self._take(settings)
        except Exception as error:
            if not self._is_configured:
                raise
            is_known = isinstance(error, AparError)
            logger.error(
                "user_config not fully applied: some settings before it stay in force",
                extra={"problem": str(error)},
                exc_info=None if is_known else error,
            )
            self._gateway.metrics.settings_refused("user_config", refused=True)
            return
        self._is_configured = True
        self._gateway.metrics.settings_refused("user_config", refused=False)

    async def _take(self, settings: IngressSettings) -> None:
        before, was_taken = self._settings, self._is_taken
        self._settings, self._is_taken = settings, False
        if self._telling is None and self._built.gateway.metrics:
            self._telling = FlushTimer(self._tell_metrics)
        self._replicas = {
            name: self._replicas.get(name) or HandleCalls(DeploymentHandle(name, APPLICATION))
            for name in settings.deployments
        }
        if not was_taken or settings.routing != before.routing:
            registry.configure(settings.routing)
        if not was_taken or (settings.gateway, settings.deployments) != (
            before.gateway,
            before.deployments,
        ):
            calls = [self._replicas[name] for name in settings.deployments]
            await self._gateway.reconfigure(settings.gateway, calls)
        if not was_taken or settings.gateway.logging != before.gateway.logging:
            # Files are opened and closed, which takes long where the disk hangs.
            await asyncio.to_thread(self._logs.configure, settings.gateway.logging)
        self._is_taken = True

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray Serve's autoscaling: requests that wait here, by the deployment they wait for."""
        waiting = self._gateway.waiting()
        return gateway_report({name: queue.num_startable for name, queue in waiting.items()})

    async def close(self) -> None:
        """Let no new request in."""
        self._door.close()

    async def inside(self) -> int:
        """Requests let in and not yet answered."""
        return self._door.inside

    async def cut(self) -> int:
        """End the requests that are left, each with an error; returns how many."""
        return self._door.cut()

    async def __del__(self) -> None:
        if self._telling is not None:
            await self._telling.close()
        await close_tracing(self._gateway.tracing)

    async def _tell_metrics(self) -> None:
        self._gateway.metrics.log_lines_dropped(self._logs.num_dropped)
        await self._gateway.tell_metrics()

    async def _is_ready(self) -> bool:
        """Whether a request would find a replica, or start one."""
        names = self._settings.deployments
        return self._settings.may_sleep or any(self._replicas[name].num_running for name in names)
