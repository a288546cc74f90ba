"""The gateway as a Ray Serve deployment: handles to the replicas, live settings, draining."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apar_core.errors import AparError
from deployments.app.autoscaling import gateway_report
from deployments.app.gateway_group import GroupMember
from deployments.client_headers import BYPASSES_SERVE, REQUEST_ID, SHORTCUT
from deployments.config import ConfigError, problems_of
from deployments.config.routing import RoutingSettings
from deployments.gateway.cors import Cors
from deployments.gateway.gateway import Gateway
from deployments.gateway.gateway_metrics import GatewayMetrics, watch_lag
from deployments.gateway.health import LIVE_PATH
from deployments.gateway.host_check import HostCheck
from deployments.gateway.settings import GatewaySettings, in_place_settings
from deployments.logs import ProcessLogs
from deployments.metrics.catalogue import LOG_LINES_DROPPED
from deployments.metrics.flush_timer import FlushTimer
from deployments.metrics.node import ProcessMetrics
from deployments.relay.direct_calls import DirectCalls
from deployments.relay.relay import send_error, send_whole
from deployments.relay.replica_calls import HandleCalls
from deployments.routing.shared_router import ROUTERS
from deployments.tracing.tracing import close_tracing
from deployments.wire.errors import (
    JSON_TYPE,
    DrainingError,
    ErrorResponse,
    MisdirectedError,
    OriginError,
    response_for,
)
from deployments.wire.response import ResponseStart
from deployments.wire.routes import form_of

logger = logging.getLogger(__name__)

APPLICATION = "apar"
GATEWAY = "Gateway"
_EVENTS = b"text/event-stream"
# Key of the complete settings in a generated `user_config`.
_WHOLE = "settings"


class IngressSettings(BaseModel):
    """The gateway's settings, and the deployments of its models in the same order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gateway: GatewaySettings
    deployments: tuple[str, ...]
    routing: RoutingSettings = RoutingSettings()

    def as_user_config(self) -> dict[str, Any]:
        """Return a `user_config`, which Ray Serve passes to running replicas and shows publicly.

        The settings contain no secrets.
        """
        return {_WHOLE: self.model_dump(mode="json")}

    @classmethod
    def from_user_config(cls, config: dict[str, Any]) -> "IngressSettings":
        """Read a `user_config` made by `as_user_config`; raises ConfigError."""
        try:
            return cls.model_validate(config[_WHOLE])
        except ValidationError as error:
            raise ConfigError(f"user_config: {problems_of(error)}") from None

    def changed_by(self, config: dict[str, Any]) -> "IngressSettings":
        """Apply a `user_config`: a generated one replaces all, a hand-written one some settings.

        Raises ConfigError.
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
    """The Serve deployment of a gateway, wrapped in its middleware."""

    def __init__(self, built: IngressSettings, *replicas: DeploymentHandle[Any]) -> None:
        settings = built.gateway
        self._logs = ProcessLogs(settings.logging, "gateway")
        self._replicas = {handle.deployment_name: self._calls(handle) for handle in replicas}
        self._built = built
        # Routers start with the default routing; the first `reconfigure` changes it.
        self._settings = built.model_copy(update={"routing": RoutingSettings()})
        self._is_configured = False
        # Whether the last settings were applied completely; if not, equal ones are applied again.
        self._is_applied = True
        calls = [self._replicas[name] for name in self._settings.deployments]
        if settings.metrics:
            unique_id = serve.get_replica_context().replica_id.unique_id
            self._process = ProcessMetrics(f"{GATEWAY}-{unique_id}", {}, settings.metrics_port)
        metrics = GatewayMetrics()
        # Ray Serve's middleware returns the ids of requests that do not bypass it.
        self._gateway = Gateway(settings, calls, sends_request_ids=False, metrics=metrics)
        self._drain = DrainMiddleware(
            self._gateway, partial(metrics.rejected, DrainingError.reason)
        )
        # Outside the drain, so that a page can read why a draining server refuses its request.
        self._cors = Cors(self._drain, settings.cors, partial(metrics.rejected, OriginError.reason))
        # Outermost: a page of another host name must learn nothing of this server.
        refused = partial(metrics.rejected, MisdirectedError.reason)
        self._host_check = HostCheck(self._cors, settings.allowed_hosts, refused)
        self._flush_timer: FlushTimer | None = None
        self._lag_watch: asyncio.Task[None] | None = None
        self._group: GroupMember | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        SHORTCUT.open(self._host_check)
        return self._host_check

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply new settings; running requests keep the old ones.

        Ray Serve replaces a replica that raises here, and the next one would fail as well. So an
        invalid `user_config` prevents a gateway from starting, but a running one only logs it.
        """
        try:
            settings = self._built.changed_by(user_config)
            await self._apply(settings)
        except Exception as error:
            if not self._is_configured:
                raise
            is_known = isinstance(error, AparError)
            logger.error(
                "user_config not fully applied: some earlier settings stay in force",
                extra={"problem": str(error)},
                exc_info=None if is_known else error,
            )
            self._gateway.metrics.settings_refused("user_config", refused=True)
            return
        self._is_configured = True
        self._gateway.metrics.settings_refused("user_config", refused=False)

    async def _apply(self, settings: IngressSettings) -> None:
        before, was_applied = self._settings, self._is_applied
        self._settings, self._is_applied = settings, False
        if self._flush_timer is None and self._built.gateway.metrics:
            self._flush_timer = FlushTimer(self._take_metrics)
            self._lag_watch = asyncio.create_task(watch_lag(self._gateway.metrics))
        self._replicas = {
            name: self._replicas.get(name) or self._calls(DeploymentHandle(name, APPLICATION))
            for name in settings.deployments
        }
        if not was_applied or settings.routing != before.routing:
            ROUTERS.configure(settings.routing)
        if not was_applied or (settings.gateway, settings.deployments) != (
            before.gateway,
            before.deployments,
        ):
            calls = [self._replicas[name] for name in settings.deployments]
            self._host_check.names = settings.gateway.allowed_hosts
            self._cors.configure(settings.gateway.cors)
            await self._gateway.reconfigure(settings.gateway, calls)
        await self._join_or_leave(settings.gateway)
        self._gateway.start()
        if not was_applied or settings.gateway.logging != before.gateway.logging:
            # Opening and closing files takes long if the disk hangs.
            await asyncio.to_thread(self._logs.configure, settings.gateway.logging)
        self._is_applied = True

    async def _join_or_leave(self, settings: GatewaySettings) -> None:
        """Share state with the other gateways, if there may be any."""
        if self._group is not None and not settings.shares_state:
            await self._group.leave()
            self._group = None
        elif self._group is not None:
            self._group.slots.num_configured = settings.num_gateways
        elif settings.shares_state:
            unique_id = serve.get_replica_context().replica_id.unique_id
            self._group = GroupMember(self._gateway, unique_id, settings.num_gateways)
            await self._group.join()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report waiting requests by deployment; called by Ray Serve."""
        waiting = self._gateway.waiting()
        return gateway_report({name: queue.num_startable for name, queue in waiting.items()})

    async def close(self) -> None:
        """Refuse new requests, and leave the batches that run here to other gateways."""
        SHORTCUT.close()
        self._drain.close()
        await self._gateway.stop_batches()

    async def inside(self) -> int:
        """Return the number of admitted requests that have not ended."""
        return self._drain.inside

    async def cut(self) -> int:
        """End the remaining requests, each with an error; return how many."""
        SHORTCUT.close()
        return self._drain.cut()

    # Ray Serve awaits this at shutdown.
    async def __del__(self) -> None:
        if self._flush_timer is not None and self._lag_watch is not None:
            self._lag_watch.cancel()
            await self._flush_timer.close()
        if self._group is not None:
            await self._group.leave()
        await self._gateway.close()
        await close_tracing(self._gateway.tracing)
        await asyncio.to_thread(self._logs.close)

    async def _take_metrics(self) -> None:
        self._gateway.metrics.recorder.set_total(LOG_LINES_DROPPED, self._logs.num_dropped)
        self._gateway.take_metrics()

    def _calls(self, handle: DeploymentHandle[Any]) -> DirectCalls:
        return DirectCalls(
            handle.deployment_name,
            HandleCalls(handle),
            lambda: self._settings.gateway.limits.max_body_bytes,
        )


class DrainMiddleware:
    """ASGI middleware that counts the running requests, and refuses new ones once closed."""

    def __init__(self, app: ASGIApp, refused: Callable[[], None] = lambda: None) -> None:
        """`refused` is called for each request that arrives after `close`."""
        self._app = app
        self._refused = refused
        # Whether each running request is being cut.
        self._tasks: dict[asyncio.Task[object], bool] = {}
        self._closed = False

    @property
    def inside(self) -> int:
        """Number of admitted requests that have not ended."""
        return len(self._tasks)

    def close(self) -> None:
        """Refuse new requests."""
        self._closed = True

    def cut(self) -> int:
        """End the running requests, each with an error; return how many."""
        self.close()
        for task in self._tasks:
            self._tasks[task] = True
            task.cancel()
        return len(self._tasks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == LIVE_PATH and scope["method"] in ("GET", "HEAD"):
            await send_whole(send, ResponseStart(HTTPStatus.OK, [JSON_TYPE], b'{"status":"ok"}'))
        elif self._closed:
            self._refused()
            await send_error(send, response_for(DrainingError()).in_form(form_of(scope["path"])))
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = False
        answer = _Response(send)
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if not self._tasks[task]:
                raise
            task.uncancel()
            error = response_for(DrainingError()).in_form(form_of(scope["path"]))
            if BYPASSES_SERVE in scope:
                ids = (item for item in scope["headers"] if item[0] == REQUEST_ID)
                error = replace(error, extra_headers=(*error.extra_headers, *ids))
            await answer.end_with(error)
        finally:
            del self._tasks[task]


class _Response:
    """Tracks how much of a response has been sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self._ended = False
        self._is_stream = False
        self._last = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            headers = dict(message["headers"])
            self._is_stream = headers.get(b"content-type", b"").startswith(_EVENTS)
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
            if body := message.get("body", b""):
                self._last = self._last[-1:] + body
        await self._send(message)

    async def end_with(self, error: ErrorResponse) -> None:
        """Send the error, or as much of it as fits what has been sent."""
        if not self._started:
            await send_error(self._send, error)
        elif not self._ended:
            # The last event may be incomplete; a blank line ends it.
            is_whole = not self._last or self._last.endswith(b"\n\n")
            events = (b"" if is_whole else b"\n\n") + error.events(self._last)
            body = events if self._is_stream else b""
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
