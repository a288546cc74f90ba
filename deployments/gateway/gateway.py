"""The HTTP gateway: identifies callers, limits and orders requests, relays replicas' answers.

All errors have OpenAI's form, and all answers carry the id of their request.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.types import Receive, Scope, Send

from apar_core.errors import CapacityError, RequestError
from deployments.gateway.body import BodyBudget, HeldBody, RequestBody, read_body
from deployments.gateway.callers import Caller, Callers
from deployments.gateway.exchange import REQUEST_ID, Charge, Exchange
from deployments.gateway.fair_queue import QueueState
from deployments.gateway.gateway_metrics import GatewayMetrics
from deployments.gateway.gateway_trace import start_trace
from deployments.gateway.models import Description, Model, by_name, find_model, list_models
from deployments.gateway.rate_limits import Admission
from deployments.gateway.settings import GatewaySettings
from deployments.gateway.web_page import PageFile, page_files
from deployments.relay.relay import ReplicaCalls, Retries, relay_answer, send_error, send_whole
from deployments.routing.shared_router import ROUTERS
from deployments.tracing.tracing import GATEWAY, open_tracing, reopened
from deployments.wire.answer import AnswerStart
from deployments.wire.errors import (
    INTERNAL_ERROR,
    JSON_TYPE,
    NotReadyError,
    UnknownRouteError,
    WrongMethodError,
    answer_for,
)
from deployments.wire.request import RelayedRequest, RequestTerms

logger = logging.getLogger(__name__)

HEALTH_PATH = "/health"
MODELS_PATH = "/v1/models"
# Other routes of vLLM are not relayed: they take token ids or control the engine.
ROUTES = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/embeddings": "POST",
    MODELS_PATH: "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/version": "GET",
    "/openapi.json": "GET",
}
_PASSED_HEADERS = (b"content-type",)


class Gateway:
    """ASGI application in front of the replicas of one or more models."""

    def __init__(
        self,
        settings: GatewaySettings,
        replicas: Sequence[ReplicaCalls],
        is_healthy: Callable[[], Awaitable[bool]],
        *,
        sends_request_ids: bool = True,
        metrics: GatewayMetrics | None = None,
    ) -> None:
        """`replicas` are in the order of the settings' models.

        `sends_request_ids` is false if a server in front of the gateway sends the ids back. Raises
        ConfigError if the keys' file cannot be read.
        """
        self._settings = settings
        self._is_healthy = is_healthy
        self._sends_request_ids = sends_request_ids
        self.metrics = metrics or GatewayMetrics()
        self._callers = Callers(settings.keys, settings.keys_file, settings.limits)
        self._models = {
            model.name: Model(model, calls)
            for model, calls in zip(settings.models, replicas, strict=True)
        }
        self._by_name = by_name(self._models.values())
        self.retries = Retries(settings.retries)
        self.tracing = open_tracing(settings.tracing, GATEWAY)
        self._descriptions: defaultdict[str, Description] = defaultdict(Description)
        self._bodies = BodyBudget(settings.limits.held_body_bytes)
        self._followed: set[str] = set()
        self._created_s = int(time.time())

    async def reconfigure(
        self, settings: GatewaySettings, replicas: Sequence[ReplicaCalls]
    ) -> None:
        """Apply new settings; running and waiting requests continue.

        The models change first: removed ones must not be offered, even if the rest fails.
        """
        models: dict[str, Model] = {}
        for model, calls in zip(settings.models, replicas, strict=True):
            known = self._models.get(model.name)
            if known is None or known.settings.deployment != model.deployment:
                models[model.name] = Model(model, calls)
                models[model.name].replicas_changed(ROUTERS.capacity(model.deployment))
            else:
                known.reconfigure(model, calls)
                models[model.name] = known
        self._bodies.max_bytes = settings.limits.held_body_bytes
        self._models = models
        self._by_name = by_name(models.values())
        self.retries.config = settings.retries
        self._settings = settings
        await self._callers.reconfigure(settings.keys, settings.keys_file, settings.limits)
        self.tracing = reopened(self.tracing, settings.tracing, GATEWAY)

    @property
    def _page(self) -> dict[str, PageFile]:
        return page_files() if self._settings.page else {}

    def waiting(self) -> dict[str, QueueState]:
        """Return the state of each model's queue, by the name of its deployment."""
        return {model.settings.deployment: model.state for model in self._models.values()}

    def take_metrics(self) -> None:
        """Record the current state in the metrics, including whether the keys file is in force."""
        self.metrics.settings_refused("keys_file", refused=self._callers.keys_are_outdated)
        self.metrics.take(self._models.values(), self._callers.metrics_classes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        if scope["type"] != "http":
            await _answer_lifespan(receive, send)
        elif scope["path"] == HEALTH_PATH and scope["method"] in ("GET", "HEAD"):
            if await self._is_healthy():
                await send_whole(send, AnswerStart(200, [JSON_TYPE], b'{"status":"ok"}'))
            else:
                await send_error(send, answer_for(NotReadyError()))
        elif scope["path"] in self._page and scope["method"] in ("GET", "HEAD"):
            await self._page[scope["path"]].send(scope, send)
        else:
            self._follow_replicas()
            exchange = Exchange(
                scope,
                send,
                keeps_content=self._settings.logging.content,
                sends_id=self._sends_request_ids,
                trace=start_trace(self.tracing, scope),
            )
            try:
                await self._serve(exchange, scope, receive)
            except asyncio.CancelledError:
                exchange.record.cancelled = True
                raise
            except Exception as error:
                if exchange.record.status is not None:
                    raise  # The client already has the start of an answer.
                logger.exception(
                    "request failed in the gateway",
                    exc_info=error,
                    extra={"path": scope["path"], "request_id": exchange.unique_id},
                )
                await send_error(exchange.send, INTERNAL_ERROR)
            finally:
                exchange.close()
                self.metrics.ended(exchange.record, exchange.caller)

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive) -> None:
        method, path = scope["method"], scope["path"]
        caller: Caller | None = None
        try:
            if ROUTES.get(path) != method:
                if path in ROUTES or path == HEALTH_PATH or path in self._page:
                    raise WrongMethodError(f"{path} does not accept {method}")
                raise UnknownRouteError(f"Unknown route: {method} {path}")
            caller = await self._callers.identify(scope["headers"])
            exchange.called_by(caller)
            # Before the body is read: reading and parsing cost more than refusing.
            admission = () if caller.rates is None else await caller.rates.admit_request()
            if method == "POST":
                with self._bodies.hold(None if caller.key is None else caller.name) as held:
                    await self._answer(caller, scope, receive, held, admission, exchange)
            else:
                await self._describe(caller, scope, exchange)
        except (RequestError, CapacityError) as error:
            self.metrics.rejected(error.reason, caller)
            if caller is not None:
                exchange.rate_headers = await caller.rate_headers()
            await send_error(exchange.send, answer_for(error))

    async def _answer(
        self,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        held: HeldBody,
        admission: Admission,
        exchange: Exchange,
    ) -> None:
        """Queue a request and relay its answer. Raises RequestError and CapacityError.

        A request refused for its content still counts in its key's rates: checking it costs as much
        as admitting it.
        """
        try:
            limits = self._settings.limits
            raw = await read_body(
                receive, limits.max_body_bytes, held, timeout_s=limits.body_timeout_s
            )
        except CapacityError:
            caller.refund(admission)
            raise
        model, request, num_tokens = self._parsed(caller, scope, raw, exchange)
        if caller.rates is not None:
            admission = (*admission, *await caller.rates.admit_tokens(num_tokens))
        exchange.queueing()
        try:
            ticket = await model.enter(caller)
        except BaseException:
            caller.refund(admission)
            raise
        exchange.record.queue_s = round(ticket.queued_s, 6)
        charge = Charge(ticket, caller.rates, admission, num_tokens, exchange.record)
        try:
            exchange.rate_headers = await caller.rate_headers()
            exchange.sending()
            calls = exchange.calls(model.replicas, model.settings.deployment)
            await relay_answer(calls, request, exchange.send, charge, self.retries)
        finally:
            charge.close()
            ROUTERS.ended(model.settings.deployment, exchange.unique_id, charge.end)

    def _parsed(
        self, caller: Caller, scope: Scope, raw: bytes, exchange: Exchange
    ) -> tuple[Model, RelayedRequest, int]:
        """Return a request's model, the request for its replicas, and its estimated prompt tokens.

        The tokens count only for a caller with rates, 0 for others. The parsed body takes several
        times its bytes and is released on return, unless its content is logged. Raises
        RequestError.
        """
        body = RequestBody(raw)
        model = find_model(self._by_name, body.model, caller, needed=True)
        adapter = body.model if body.model in model.settings.adapters else None
        exchange.begin(model.settings.name, body, adapter)
        key = caller.key
        if key is not None and body.fields.get("priority") is not None:
            raise RequestError("`priority` is set by the API key", param="priority")
        body.check_prompt(
            self._settings.limits.max_prompt_chars, "the limit `limits.max_prompt_chars`"
        )
        if key is not None:
            body.check_prompt(key.max_prompt_chars, "the limit `max_prompt_chars` of this key")
        cache_salt = body.cache_salt(caller.cache_salt)
        request = RelayedRequest(
            scope["method"],
            scope["path"],
            scope["query_string"],
            _headers(scope, exchange),
            raw,
            RequestTerms(
                request_id=exchange.unique_id,
                priority=0 if key is None else key.priority,
                key=None if key is None else key.name,
                key_max_threads=model.max_threads_of(caller),
                cache_salt=cache_salt,
            ),
            body.hint(cache_salt, adapter),
            streams=body.streams,
            continuable=body.can_continue(scope["path"]),
        )
        if caller.rates is None:
            return model, request, 0
        # The hint describes the first of several prompts, but counts the chat template's tokens.
        return model, request, max(request.hint.prompt_tokens, body.prompt_tokens)

    async def _describe(self, caller: Caller, scope: Scope, exchange: Exchange) -> None:
        """Answer a GET request about the server, which does not wait in a model's queue."""
        wait_s = self._settings.models_wait_s
        method, path, query = scope["method"], scope["path"], scope["query_string"]
        request = RelayedRequest(method, path, query, _headers(scope, exchange), b"")
        if path == MODELS_PATH:
            models = {name: model for name, model in self._by_name.items() if caller.may_use(name)}
            answer = await list_models(models, request, wait_s, created_s=self._created_s)
        else:
            # A call to a sleeping model would start a replica.
            awake = by_name(model for model in self._models.values() if model.replicas.num_running)
            model = find_model(awake or self._by_name, None, caller, needed=False)
            exchange.begin(model.settings.name, None)
            try:
                answer = await self._descriptions[path].ask(model.replicas, request, wait_s)
            except TimeoutError:
                not_ready = answer_for(NotReadyError())
                answer = AnswerStart(not_ready.status, not_ready.headers, not_ready.body)
        exchange.rate_headers = await caller.rate_headers()
        await send_whole(exchange.send, answer)

    def _follow_replicas(self) -> None:
        """Keep the models' capacity in step with the running replicas that their routers see."""
        new = {model.settings.deployment for model in self._models.values()} - self._followed
        for deployment in new:
            self._followed.add(deployment)
            changed = partial(
                _call_in, asyncio.get_running_loop(), self._replicas_changed, deployment
            )
            ROUTERS.listen(deployment, changed)

    def _replicas_changed(self, deployment: str, num_running: int) -> None:
        for model in self._models.values():
            if model.settings.deployment == deployment:
                model.replicas_changed(num_running)


def _call_in(
    loop: asyncio.AbstractEventLoop, function: Callable[[str, int], None], name: str, count: int
) -> None:
    """Schedule a function on the gateway's event loop, from any executor."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, name, count)


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    """Acknowledge the lifespan that Ray Serve runs for every ingress; nothing is set up here."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _headers(scope: Scope, exchange: Exchange) -> list[tuple[bytes, bytes]]:
    headers = [item for item in scope["headers"] if item[0] in _PASSED_HEADERS]
    return [*headers, (REQUEST_ID, exchange.request_id.encode())]
