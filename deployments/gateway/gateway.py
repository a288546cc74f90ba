"""The HTTP gateway: identifies callers, limits and queues requests, relays replicas' responses.

Errors have the form of their route's API, and all responses carry the id of their request.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus

from starlette.types import Message, Receive, Scope, Send

from apar_core.errors import CapacityError, RequestError
from deployments.client_headers import BYPASSES_SERVE, REQUEST_ID
from deployments.config.keys import KeyConfig
from deployments.gateway.accounts import Size
from deployments.gateway.admin import ADMIN_PATH, Admin
from deployments.gateway.batches.api import FILES_PATH, MAX_FIELDS_BYTES, is_batch_path
from deployments.gateway.batches.runner import LineAnswer, LineCall
from deployments.gateway.batches.service import Batches
from deployments.gateway.batches.store import open_store
from deployments.gateway.bill import Bill
from deployments.gateway.body import BodyBudget, HeldBody, RequestBody, read_body
from deployments.gateway.callers import Caller, Callers
from deployments.gateway.exchange import Exchange
from deployments.gateway.fair_queue import LINE_PRIORITY, Due, QueueState, Ticket
from deployments.gateway.gateway_metrics import LINE_IS_RETRIED, GatewayMetrics
from deployments.gateway.gateway_trace import start_trace
from deployments.gateway.health import (
    HEALTH_PATH,
    LIVE_PATH,
    READY_PATH,
    HealthProbe,
    health_response,
    model_response,
    not_ready,
    ready_response,
)
from deployments.gateway.models import Model, by_name, card_of, describe, find_model, list_models
from deployments.gateway.request_options import priority_of, read_options
from deployments.gateway.settings import GatewaySettings
from deployments.gateway.shared_slots import Need, SharedSlots
from deployments.gateway.web_page import PageFile, page_files
from deployments.metrics.catalogue import SHARED_STATE_SILENT
from deployments.relay.relay import (
    ModelReplicas,
    Retries,
    relay_response,
    send_as_is,
    send_error,
    send_whole,
)
from deployments.routing.shared_router import ROUTERS
from deployments.tracing.tracing import GATEWAY, open_tracing, reopened
from deployments.wire.errors import (
    INTERNAL_ERROR,
    JSON_TYPE,
    NotReadyError,
    QueueTimeoutError,
    UnknownKeyError,
    UnknownRouteError,
    WrongMethodError,
    response_for,
)
from deployments.wire.request import Deadlines, RelayedRequest, RequestHint, RequestTerms
from deployments.wire.response import ResponseStart
from deployments.wire.routes import MODELS_PATH, ONE_MODEL, OPENAPI_PATH, ROUTES, STORED_RESPONSES

logger = logging.getLogger(__name__)

WAIT_HEADER = b"x-apar-wait-s"
"""Seconds that a client waits for a model without a running replica, instead of the default."""
MAX_WAIT_S = 3600.0
_ADMIN_BODY_BYTES = 2**16
_PASSED_HEADERS = (b"content-type",)


_LINE = "apar.batch_line"
"""Scope key of a request that is the line of a batch; no client can set it."""
# Lines may take this part of `limits.max_held_body_bytes`; answers come on top.
_LINES_SHARE = 8


class Gateway:
    """ASGI application in front of the replicas of one or more models."""

    def __init__(
        self,
        settings: GatewaySettings,
        replicas: Sequence[ModelReplicas],
        *,
        sends_request_ids: bool = True,
        metrics: GatewayMetrics | None = None,
    ) -> None:
        """`replicas` are in the order of the settings' models.

        `sends_request_ids` is false if a server in front of the gateway returns the ids. Raises
        ConfigError if the keys file cannot be read.
        """
        self._settings = settings
        self._health = HealthProbe()
        self._sends_request_ids = sends_request_ids
        self.metrics = metrics or GatewayMetrics()
        self.callers = Callers(
            settings.keys, settings.keys_file, settings.limits, settings.key_store
        )
        self._admin = Admin(self.callers)
        # Leases of slots, if this is one of several gateways.
        self._slots: SharedSlots | None = None
        self._models = {
            model.name: Model(model, calls)
            for model, calls in zip(settings.models, replicas, strict=True)
        }
        self._by_name = by_name(self._models.values())
        self.retries = Retries(settings.retries)
        self.tracing = open_tracing(settings.tracing, GATEWAY)
        self._bodies = BodyBudget(settings.limits.held_body_bytes)
        self._batches = self._open_batches(settings)
        self._is_started = False
        self._followed: set[str] = set()
        self._created_s = int(time.time())

    async def reconfigure(
        self, settings: GatewaySettings, replicas: Sequence[ModelReplicas]
    ) -> None:
        """Apply new settings; running and waiting requests continue.

        The models change first: removed ones must not be offered, even if the rest fails.
        """
        models: dict[str, Model] = {}
        for model, calls in zip(settings.models, replicas, strict=True):
            known = self._models.get(model.name)
            if known is None or known.settings.deployment != model.deployment:
                models[model.name] = Model(model, calls, self._slots)
                models[model.name].replicas_changed(ROUTERS.capacity(model.deployment))
            else:
                known.reconfigure(model, calls)
                models[model.name] = known
        before = self._settings
        self._bodies.max_bytes = settings.limits.held_body_bytes
        self._models = models
        self._by_name = by_name(models.values())
        self.retries.config = settings.retries
        self._settings = settings
        await self.callers.reconfigure(
            settings.keys, settings.keys_file, settings.limits, settings.key_store
        )
        self.tracing = reopened(self.tracing, settings.tracing, GATEWAY)
        await self._reconfigure_batches(before, settings)

    async def _reconfigure_batches(
        self, before: GatewaySettings, settings: GatewaySettings
    ) -> None:
        if _database_of(before) != _database_of(settings):
            await self.stop_batches()
            self._batches = self._open_batches(settings)
            if self._is_started and self._batches is not None:
                self._batches.start()
        elif self._batches is not None:
            self._batches.configure(settings.batches)

    def _open_batches(self, settings: GatewaySettings) -> Batches | None:
        if not settings.batches.enabled or settings.batch_store is None:
            return None
        store = open_store(settings.batch_store, settings.limits.read_storage_uri())
        return Batches(store, self, self.metrics, settings.batches)

    def start(self) -> None:
        """Run the batches that are waiting, from now on."""
        self._is_started = True
        if self._batches is not None:
            self._batches.start()

    async def stop_batches(self) -> None:
        """Leave the batches that run here to other gateways, or to the next start."""
        batches, self._batches = self._batches, None
        if batches is not None:
            await batches.close()

    async def close(self) -> None:
        """Write what is still in memory; requests must have ended."""
        await self.stop_batches()
        await self.callers.close()

    async def answer_line(self, call: LineCall) -> LineAnswer:
        """Answer a request of a batch like one of its key's, at the lowest priority."""
        answer = _CollectedAnswer(call.body)
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": call.path,
            "query_string": b"",
            "headers": [JSON_TYPE, (REQUEST_ID, call.request_id.encode())],
            _LINE: call,
        }
        await self(scope, answer.receive, answer.send)
        return answer.collected()

    async def caller_named(self, name: str) -> Caller | None:
        """Return the caller of this name, None while none is in force. Raises StoreError."""
        return await self.callers.named(name)

    def check_model(self, name: object, caller: Caller) -> None:
        """Raise RequestError for a model that the caller cannot use."""
        if isinstance(name, str):
            name = self._settings.aliases.get(name, name)
        find_model(self._by_name, name, caller, needed=True)

    @property
    def max_body_bytes(self) -> int:
        """Limit on the body of a request."""
        return self._settings.limits.max_body_bytes

    @property
    def max_batch_bytes(self) -> int:
        """Limit on the bodies of all lines of batches in queues and at replicas."""
        return self._settings.limits.held_body_bytes // _LINES_SHARE

    @property
    def _page(self) -> dict[str, PageFile]:
        return page_files() if self._settings.page else {}

    def waiting(self) -> dict[str, QueueState]:
        """Return the state of each model's queue, by the name of its deployment."""
        return {model.settings.deployment: model.state for model in self._models.values()}

    def share(self, slots: SharedSlots | None) -> None:
        """Use these leases of slots; None if this is the only gateway."""
        self._slots = slots
        for model in self._models.values():
            model.share(slots)

    def needs(self) -> dict[str, Need]:
        """Return this gateway's needs for slots that all gateways share."""
        return {
            slot: need for model in self._models.values() for slot, need in model.needs().items()
        }

    def take_slots(self) -> None:
        """Start the waiting requests for which the current leases have room."""
        for model in self._models.values():
            model.take_slots()

    def take_metrics(self) -> None:
        """Record the current state in the metrics, including whether the keys file is in force."""
        self.metrics.settings_refused("keys_file", refused=self.callers.keys_are_outdated)
        is_alone = self._slots is not None and self._slots.is_alone
        self.metrics.recorder.set(SHARED_STATE_SILENT, float(is_alone))
        self.metrics.take(self._models.values(), self.callers.metrics_classes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        if scope["type"] != "http":
            await _answer_lifespan(receive, send)
        elif _is_about_health(scope["path"]) and scope["method"] in ("GET", "HEAD"):
            await self._tell_health(scope, send)
        elif scope["path"] in self._page and scope["method"] in ("GET", "HEAD"):
            await self._page[scope["path"]].send(scope, send)
        else:
            self._follow_replicas()
            exchange = Exchange(
                scope,
                send,
                keeps_content=self._settings.logging.content,
                sends_id=self._sends_request_ids or BYPASSES_SERVE in scope,
                trace=start_trace(self.tracing, scope),
            )
            try:
                await self._serve(exchange, scope, receive)
            except asyncio.CancelledError:
                exchange.record.cancelled = True
                raise
            except Exception as error:
                if exchange.record.status is not None:
                    raise  # The client already has the start of a response.
                logger.exception(
                    "request failed in the gateway",
                    exc_info=error,
                    extra={"path": scope["path"], "request_id": exchange.unique_id},
                )
                await send_error(exchange.send, INTERNAL_ERROR.in_form(exchange.form))
            finally:
                exchange.close()
                self.metrics.ended(exchange.record, exchange.caller)
                self._count_refusal(exchange)

    def _count_refusal(self, exchange: Exchange) -> None:
        """Count a key's refused request if it was sent to no replica."""
        record, caller = exchange.record, exchange.caller
        if record.batch_id is not None and record.status in LINE_IS_RETRIED:
            return
        is_refused = record.sent_s is None and (record.status or 0) >= HTTPStatus.BAD_REQUEST
        if is_refused and caller is not None and caller.key is not None:
            self.callers.ledger.refused(caller.name, record)

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive) -> None:
        method, path = _answered_method(scope), scope["path"]
        caller: Caller | None = None
        line: LineCall | None = scope.get(_LINE)
        try:
            if path.startswith(ADMIN_PATH):
                await self._administer(exchange, scope, receive)
                return
            if self._batches is not None and is_batch_path(path):
                await self._serve_batches(self._batches, exchange, scope, receive)
                return
            accepted = self._method_of(path)
            if accepted != method:
                if accepted is not None:
                    raise WrongMethodError(scope["method"], path, [accepted])
                if path.startswith(STORED_RESPONSES):
                    raise UnknownRouteError(
                        f"Responses are not stored here, so {path} does not exist"
                    )
                raise UnknownRouteError(f"Unknown route: {scope['method']} {path}")
            if line is None:
                caller = await self.callers.identify(scope["headers"])
            else:
                caller, exchange.record.batch_id = line.caller, line.batch_id
            exchange.called_by(caller)
            # Before the body is read: reading and parsing cost more than refusing.
            if method == "POST" and caller.key is not None:
                await self.callers.ledger.check(caller.key)
            admission = (
                ()
                if caller.rates is None
                else await caller.rates.admit_request(leaves_half=line is not None)
            )
            if method == "POST":
                bill = Bill(caller, admission, self.callers.ledger, exchange.record)
                owner = None if caller.key is None else caller.name
                if line is not None:
                    # Apart from the key's other requests, which need room too.
                    owner = f"batches of {caller.name}"
                with bill, self._bodies.hold(owner) as held:
                    await self._answer(caller, scope, receive, held, bill, exchange)
            else:
                await self._describe(caller, scope, exchange)
        except (RequestError, CapacityError) as error:
            if line is None:
                self.metrics.rejected(error.reason, caller)
            if caller is not None and line is None:
                exchange.rate_headers = await caller.rate_headers()
            await send_error(exchange.send, response_for(error).in_form(exchange.form))

    def _method_of(self, path: str) -> str | None:
        """Return the method that a path accepts, None if it does not exist."""
        if path in ROUTES:
            return ROUTES[path].method
        is_known = path.startswith(ONE_MODEL) or path == LIVE_PATH or path in self._page
        return "GET" if is_known or _is_about_health(path) else None

    async def _answer(
        self,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        held: HeldBody,
        bill: Bill,
        exchange: Exchange,
    ) -> None:
        """Queue a request and relay its response. Raises RequestError and CapacityError."""
        try:
            limits = self._settings.limits
            raw = await read_body(
                receive,
                scope["headers"],
                limits.max_body_bytes,
                held,
                timeout_s=limits.body_timeout_s,
            )
        except CapacityError:
            bill.refund()
            raise
        line: LineCall | None = scope.get(_LINE)
        wait_s = _asked_wait_s(scope)
        if line is not None:
            wait_s = min(MAX_WAIT_S, max(1.0, line.until_s - time.time()))
        model, request, size = self._parsed(caller, scope, raw, exchange)
        terms = request.terms
        await bill.admit(size.prompt_tokens)
        exchange.queueing()
        starts = not model.replicas.num_running
        try:
            model, request, ticket = await self._enter(
                caller,
                model,
                request,
                size,
                exchange,
                wait_s if starts or line is not None else None,
            )
        except QueueTimeoutError:
            if model.replicas.num_running:
                raise
            raise not_ready(await model.replicas.starting()) from None
        bill.placed(ticket)
        if wait_s is not None:
            starts = starts and exchange.record.fallback_of is None
            wait_s = max(wait_s - ticket.queued_s, 1.0) if starts else None
        try:
            exchange.rate_headers = await caller.rate_headers()
            exchange.sending()
            if terms.deadlines is not None:
                request = replace(request, hint=_hurried(request.hint, terms.deadlines))
            calls = exchange.calls(model.replicas, model.settings.deployment)
            await relay_response(
                calls,
                request,
                exchange.send,
                bill,
                self.retries,
                wait_s,
                hold=held.add,
                certain=exchange.certain,
            )
        finally:
            ROUTERS.ended(model.settings.deployment, exchange.unique_id, bill.end)

    async def _enter(
        self,
        caller: Caller,
        model: Model,
        request: RelayedRequest,
        size: Size,
        exchange: Exchange,
        max_wait_s: float | None,
    ) -> tuple[Model, RelayedRequest, Ticket]:
        """Wait for slots at a model's replicas, or at those of its fallback.

        A request that waits for its model to start, at most `max_wait_s`, does not go to the
        fallback meanwhile. Returns the model that answers, the request for it, and the ticket for
        its slots. Raises like `Model.enter`.
        """
        priority, due = request.terms.priority, _due(request.terms.deadlines)
        name = self._settings.fallback.get(exchange.record.adapter or model.settings.name)
        if exchange.record.batch_id is not None:
            name = None  # It can wait for the model that it asks for.
        other = None if name is None or not caller.may_use(name) else self._by_name.get(name)
        if name is None or other is None or size.num_sequences > other.max_sequences:
            return model, request, await model.enter(caller, priority, due, max_wait_s, size)
        if max_wait_s is not None or not model.has_lost_all or other.has_lost_all:
            try:
                return model, request, await model.enter(caller, priority, due, max_wait_s, size)
            except CapacityError as error:
                refusal = error
            try:
                ticket = await other.enter(caller, priority, due, size=size)
            except CapacityError:
                raise refusal from None
        else:
            ticket = await other.enter(caller, priority, due, size=size)
        exchange.fell_back(other.settings.name, name)
        terms = replace(request.terms, model=name, key_max_threads=other.max_threads_of(caller))
        return other, replace(request, terms=terms), ticket

    def _parsed(
        self, caller: Caller, scope: Scope, raw: bytes, exchange: Exchange
    ) -> tuple[Model, RelayedRequest, Size]:
        """Return a request's model, the request for its replicas, and its size.

        Prompt tokens count only for a caller with a key; they are 0 for others. The parsed body
        takes several times its bytes and is released on return, unless its content is logged.
        Raises RequestError.
        """
        route = ROUTES[scope["path"]]
        body = RequestBody(raw, route.shape)
        name = body.model
        if isinstance(name, str):
            name = self._settings.aliases.get(name, name)
        model = find_model(self._by_name, name, caller, needed=True)
        adapter = name if name in model.settings.adapters else None
        exchange.begin(model.settings.name, body, adapter)
        key = caller.key
        options = read_options(body.fields, scope["headers"])
        priority = 0 if key is None else priority_of(key, body.fields)
        if _LINE in scope:
            priority = LINE_PRIORITY
        body.check_prompt(
            self._settings.limits.max_prompt_chars, "the limit `limits.max_prompt_chars`"
        )
        if key is not None:
            body.check_prompt(key.max_prompt_chars, "the limit `max_prompt_chars` of this key")
        num_sequences = _checked_sequences(body, model, key, generates=route.forks)
        cache_salt = body.cache_salt(caller.cache_salt)
        request = RelayedRequest(
            scope["method"],
            scope["path"],
            scope["query_string"],
            _headers(scope, exchange),
            raw,
            RequestTerms(
                request_id=exchange.unique_id,
                priority=priority,
                key=None if key is None else key.name,
                key_max_threads=model.max_threads_of(caller),
                cache_salt=cache_salt,
                model=None if name == body.model else name,
                deadlines=options.deadlines(exchange.arrived_at_s),
            ),
            body.hint(
                cache_salt, adapter, options, forks_with_tools=model.settings.forks_with_tools
            ),
            streams=route.forks and body.streams,
            continuable=route.forks and body.can_continue,
        )
        if key is None:
            return model, request, Size(num_sequences)
        # The hint describes the first of several prompts, but counts the chat template's tokens.
        prompt_tokens = max(request.hint.prompt_tokens, body.prompt_tokens)
        return model, request, Size(num_sequences, prompt_tokens)

    async def _administer(self, exchange: Exchange, scope: Scope, receive: Receive) -> None:
        """Handle a request to an admin route."""
        # The logged path omits the name: somebody may send the key itself by mistake.
        if scope["path"].startswith(f"{ADMIN_PATH}keys/"):
            exchange.record.path = f"{ADMIN_PATH}keys/NAME"
        caller = await self.callers.identify(scope["headers"])
        exchange.called_by(caller)
        limits = self._settings.limits
        with self._bodies.hold(caller.name) as held:
            body = await read_body(
                receive,
                scope["headers"],
                min(_ADMIN_BODY_BYTES, limits.max_body_bytes),
                held,
                timeout_s=limits.body_timeout_s,
            )
        answer = await self._admin.answer(
            _answered_method(scope), scope["path"], scope["query_string"], body, caller
        )
        await send_whole(exchange.send, answer)

    async def _serve_batches(
        self, batches: Batches, exchange: Exchange, scope: Scope, receive: Receive
    ) -> None:
        """Handle a request to a route of the Batch API."""
        method, limits = _answered_method(scope), self._settings.limits
        batches.api.check_route(method, scope["path"])
        caller = await self.callers.identify(scope["headers"])
        exchange.called_by(caller)
        if caller.rates is not None:
            await caller.rates.admit_request()
        with self._bodies.hold(caller.name) as held:
            body = b""
            if method == "POST" and scope["path"] != FILES_PATH:
                body = await read_body(
                    receive,
                    scope["headers"],
                    min(MAX_FIELDS_BYTES, limits.max_body_bytes),
                    held,
                    timeout_s=limits.body_timeout_s,
                )
            exchange.rate_headers = await caller.rate_headers()
            await batches.api.answer(method, scope, receive, body, caller.owner, exchange.send)

    async def _describe(self, caller: Caller, scope: Scope, exchange: Exchange) -> None:
        """Answer a GET request about the server; it does not wait in a model's queue."""
        wait_s = self._settings.models_wait_s
        path = scope["path"]
        one = path.removeprefix(ONE_MODEL) if path.startswith(ONE_MODEL) else None
        asked_path = path if one is None else MODELS_PATH
        headers = _headers(scope, exchange)
        request = RelayedRequest("GET", asked_path, scope["query_string"], headers, b"")
        if asked_path == MODELS_PATH:
            models = {name: model for name, model in self._by_name.items() if caller.may_use(name)}
            answer = await list_models(
                models,
                request,
                wait_s,
                created_s=self._created_s,
                aliases=self._settings.aliases,
            )
            if one is not None:
                answer = card_of(one, answer)
        else:
            # A call to a sleeping model would start a replica.
            awake = by_name(model for model in self._models.values() if model.replicas.num_running)
            known = awake or self._by_name
            model = find_model(known, None, caller, needed=False)
            exchange.begin(model.settings.name, None)
            asked = [model]
            if path == OPENAPI_PATH:
                usable = (each for name, each in known.items() if caller.may_use(name))
                asked = list(dict.fromkeys(usable))
            found = await describe(asked, request, wait_s)
            if found is None:
                refusal = response_for(NotReadyError())
                found = ResponseStart(refusal.status, refusal.headers, refusal.body)
            answer = found
        exchange.rate_headers = await caller.rate_headers()
        await send_whole(exchange.send, answer)

    async def _tell_health(self, scope: Scope, send: Send) -> None:
        """Answer `/ready`, `/health` and `/health/MODEL`.

        Probes send no key. If keys are required, only callers with a key see individual models.
        """
        try:
            caller: Caller | None = await self.callers.identify(scope["headers"])
        except UnknownKeyError as error:
            caller, refusal = None, error
        path = scope["path"]
        if path in (HEALTH_PATH, READY_PATH):
            models = {model.settings.name: model for model in self._models.values()}
            health = await self._health.all_of(models)
            if path == READY_PATH:
                await send_as_is(send, ready_response(health))
                return
            shown = [name for name in models if caller is not None and caller.may_use(name)]
            await send_as_is(send, health_response(health, shown))
        elif caller is None:
            await send_error(send, response_for(refusal))
        else:
            try:
                name = path.removeprefix(f"{HEALTH_PATH}/")
                model = find_model(self._by_name, name, caller, needed=True)
            except RequestError as error:
                await send_error(send, response_for(error))
                return
            await send_as_is(send, model_response(await self._health.of(model)))

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


class _CollectedAnswer:
    """Gives a request its body, and collects the answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []

    async def receive(self) -> Message:
        """Return the body, once."""
        body, self._body = self._body, None
        assert body is not None, "a request reads its body once"
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Take a part of the answer."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
        else:
            self._pieces.append(message.get("body", b""))

    def collected(self) -> LineAnswer:
        """Return the answer; its body is JSON."""
        body = b"".join(self._pieces)
        if not self._headers.get(b"content-type", b"").startswith(b"application/json"):
            body = json.dumps(body.decode(errors="replace")).encode()
        retry_after = self._headers.get(b"retry-after")
        return LineAnswer(self._status, body, None if retry_after is None else float(retry_after))


def _database_of(settings: GatewaySettings) -> tuple[object, ...]:
    """Return what decides where files and batches are stored."""
    limits = settings.limits
    return (
        settings.batches.enabled,
        settings.batch_store,
        limits.rate_storage,
        limits.rate_storage_password,
    )


def _call_in(
    loop: asyncio.AbstractEventLoop, function: Callable[[str, int], None], name: str, count: int
) -> None:
    """Schedule a function on the gateway's event loop, from any executor."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, name, count)


def _answered_method(scope: Scope) -> str:
    """Return the method as which a request is handled: GET for HEAD.

    A server in front of the gateway drops the body of a response to HEAD.
    """
    method: str = scope["method"]
    return "GET" if method == "HEAD" else method


def _is_about_health(path: str) -> bool:
    return path in (HEALTH_PATH, READY_PATH) or path.startswith(f"{HEALTH_PATH}/")


def _asked_wait_s(scope: Scope) -> float | None:
    """Return the `x-apar-wait-s` of a request, None without one. Raises RequestError."""
    given = next((value for name, value in scope["headers"] if name == WAIT_HEADER), None)
    if given is None:
        return None
    try:
        wait_s = float(given)
    except ValueError:
        wait_s = math.nan
    if not 0.0 < wait_s <= MAX_WAIT_S:
        name = WAIT_HEADER.decode()
        raise RequestError(
            f"`{name}` must be a number of seconds above 0 and at most {MAX_WAIT_S:g}, not "
            f"{given.decode('latin-1')[:32]!r}",
            param=name,
        )
    return wait_s


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    """Acknowledge the lifespan events that Ray Serve sends an ingress; nothing is set up here."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _checked_sequences(
    body: RequestBody, model: Model, key: KeyConfig | None, *, generates: bool
) -> int:
    """Return the number of slots that a request takes. Raises RequestError if it exceeds a limit.

    A replica takes a request as a whole, so it needs slots for all of its sequences. Without
    `generates`, sequences end one by one after their prompts: a longer list takes all slots.
    """
    limits = {"the limit `max_concurrency` of this model": model.max_sequences}
    if key is not None and key.max_threads is not None:
        limits["the limit `max_threads` of this key"] = key.max_threads
    if generates:
        for name, limit in limits.items():
            body.check_sequences(limit, name)
    return min(body.num_sequences, *limits.values())


def _due(deadlines: Deadlines | None) -> Due | None:
    """Return when a request must have left the queue; None without a deadline."""
    if deadlines is None:
        return None
    option, at_s = deadlines.first
    return Due(option, at_s - time.time())


def _hurried(hint: RequestHint, deadlines: Deadlines) -> RequestHint:
    """Return the hint with the seconds left until the deadlines, for a request sent now."""
    now_s = time.time()
    first, answer = (
        math.inf if at_s is None else at_s - now_s
        for at_s in (deadlines.first_token_at_s, deadlines.answer_at_s)
    )
    return replace(hint, first_token_s=first, answer_s=answer)


def _headers(scope: Scope, exchange: Exchange) -> list[tuple[bytes, bytes]]:
    headers = [item for item in scope["headers"] if item[0] in _PASSED_HEADERS]
    return [*headers, (REQUEST_ID, exchange.request_id.encode())]
