"""The HTTP ingress: knows the caller, bounds and orders the requests, relays a replica's answer.

Every error that leaves it has OpenAI's form, and every answer the id of its request.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from apar_core.errors import CapacityError, RequestError
from deployments.gateway.body import (
    BodyBudget,
    BodyTimeoutError,
    BodyTooLargeError,
    HeldBody,
    PromptTooLongError,
    parse_fields,
    prompt_tokens,
    read_body,
)
from deployments.gateway.callers import Caller, Callers
from deployments.gateway.charge import Charge
from deployments.gateway.exchange import REQUEST_ID, Exchange
from deployments.gateway.fair_queue import QueueState
from deployments.gateway.gateway_metrics import GatewayMetrics
from deployments.gateway.gateway_trace import start_trace
from deployments.gateway.hint import request_hint
from deployments.gateway.keys import UnknownKeyError
from deployments.gateway.models import Descriptions, Model, ModelList, UnknownModelError, find_model
from deployments.gateway.prompt_limits import checked_prompt
from deployments.gateway.rate_limits import Admission, RateLimitError
from deployments.gateway.settings import GatewaySettings
from deployments.metrics.recorder import NoInstruments
from deployments.metrics.rejections import Rejection
from deployments.relay.relay import ReplicaCalls, relay_answer, send_error, send_whole
from deployments.relay.retries import Retries
from deployments.routing.shared_router import ROUTERS
from deployments.tracing.tracing import GATEWAY, open_tracing, reopened
from deployments.wire.answer import AnswerStart
from deployments.wire.errors import (
    JSON_TYPE,
    ErrorAnswer,
    answer_for,
    body_timeout,
    body_too_large,
    internal_error,
    no_replica,
    prompt_too_long,
    rate_limited,
    unknown_key,
    unknown_model,
    unknown_route,
    wrong_method,
)
from deployments.wire.request import RelayedRequest, RequestHint, RequestTerms
from deployments.wire.terms_in_body import salt_within


def refusal_for(error: RequestError | CapacityError) -> ErrorAnswer:
    """The answer for what stood in a request's way."""
    match error:
        case UnknownKeyError():
            return unknown_key(str(error))
        case RateLimitError():
            return rate_limited(str(error), error.kind, error.retry_after_s)
        case BodyTooLargeError():
            return body_too_large(str(error))
        case BodyTimeoutError():
            return body_timeout(str(error))
        case PromptTooLongError():
            return prompt_too_long(str(error), error.param)
        case UnknownModelError():
            return unknown_model(error.name)
        case _:
            return answer_for(error)


logger = logging.getLogger(__name__)

HEALTH_PATH = "/health"
MODELS_PATH = "/v1/models"
# What is relayed; vLLM's other routes take token ids or control the engine.
ROUTES = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    MODELS_PATH: "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/version": "GET",
    "/openapi.json": "GET",
}
_PASSED_HEADERS = (b"content-type",)
_NO_TERMS = RequestTerms()
_NO_HINT = RequestHint()


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
        """`replicas` are those of the settings' models, in their order.

        `sends_request_ids` false means that the server before us sends the request's id back.
        Raises ConfigError if the keys' file cannot be read.
        """
        self._settings = settings
        self._is_healthy = is_healthy
        self._sends_request_ids = sends_request_ids
        self.metrics = metrics or GatewayMetrics(NoInstruments())
        self._callers = Callers(settings.keys, settings.keys_file, settings.limits)
        self._models = {
            model.name: Model(model, calls)
            for model, calls in zip(settings.models, replicas, strict=True)
        }
        self.retries = Retries(settings.retries)
        self.tracing = open_tracing(settings.tracing, GATEWAY)
        self._list = ModelList()
        self._descriptions = Descriptions()
        self._bodies = BodyBudget(settings.limits.held_body_bytes)
        self._followed: set[str] = set()

    async def reconfigure(
        self, settings: GatewaySettings, replicas: Sequence[ReplicaCalls]
    ) -> None:
        """Take new settings; requests that run or wait go on.

        The models come first: those that are gone must not be offered, whatever else is wrong.
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
        self._list.models_changed(models.keys())
        self._models = models
        self.retries.config = settings.retries
        self._settings = settings
        await self._callers.reconfigure(settings.keys, settings.keys_file, settings.limits)
        self.tracing = reopened(self.tracing, settings.tracing, GATEWAY)

    def waiting(self) -> dict[str, QueueState]:
        """How the queue of each model stands, by the name of its deployment."""
        return {model.settings.deployment: model.state for model in self._models.values()}

    async def tell_metrics(self) -> None:
        """Hand the metrics over, as they are now."""
        self.metrics.settings_refused("keys_file", refused=self._callers.keys_are_outdated)
        self.metrics.flush(self._models.values(), self._settings.keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        if scope["type"] != "http":
            await _answer_lifespan(receive, send)
        elif scope["path"] == HEALTH_PATH and scope["method"] in ("GET", "HEAD"):
            await self._answer_health(send)
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
                    raise  # An answer that has begun cannot become another.
                logger.exception(
                    "request failed in the gateway",
                    exc_info=error,
                    extra={"path": scope["path"], "request_id": exchange.unique_id},
                )
                await send_error(exchange.send, internal_error())
            finally:
                exchange.close()
                self.metrics.ended(exchange.record, exchange.caller)

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive) -> None:
        method, path = scope["method"], scope["path"]
        allowed = ROUTES.get(path)
        if allowed != method:
            self.metrics.rejected(Rejection.UNKNOWN_ROUTE)
            known = allowed is not None or path == HEALTH_PATH
            await send_error(
                exchange.send, (wrong_method if known else unknown_route)(method, path)
            )
            return
        caller: Caller | None = None
        try:
            caller = await self._callers.identify(scope["headers"])
            exchange.called_by(caller)
            # Before the body is read: to read and to parse it costs more than to refuse it.
            admission = () if caller.rates is None else await caller.rates.admit_request()
            if method == "POST":
                with self._bodies.hold(None if caller.key is None else caller.name) as held:
                    await self._answer(caller, scope, receive, held, admission, exchange)
            else:
                await self._describe(caller, _relayed(exchange, scope, b""), exchange)
        except (RequestError, CapacityError) as error:
            self.metrics.refused(error, caller)
            if caller is not None:
                exchange.rate_headers = await caller.rate_headers()
            await send_error(exchange.send, refusal_for(error))

    async def _answer(
        self,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        held: HeldBody,
        admission: Admission,
        exchange: Exchange,
    ) -> None:
        """Let the request in, in its turn, and relay its answer; raises where it may not go in.

        A request that is refused for what it holds still counts in its key's rates: to find that
        out costs as much as to let it in.
        """
        try:
            limits = self._settings.limits
            body = await read_body(
                receive, limits.max_body_bytes, held, timeout_s=limits.body_timeout_s
            )
        except CapacityError:
            caller.give_back(admission)
            raise
        model, request, num_tokens = self._parsed(caller, scope, body, exchange)
        if caller.rates is not None:
            admission = (*admission, *await caller.rates.admit_tokens(num_tokens))
        exchange.queueing()
        try:
            ticket = await model.enter(caller)
        except BaseException:
            caller.give_back(admission)
            raise
        exchange.record.queue_s = round(ticket.queued_s, 6)
        charge = Charge(ticket, caller.rates, admission, num_tokens, exchange)
        try:
            exchange.rate_headers = await caller.rate_headers()
            exchange.sending()
            await relay_answer(
                exchange.calls(model.replicas, model.settings.deployment),
                request,
                exchange.record.stream,
                exchange.send,
                charge,
                self.retries,
            )
        finally:
            charge.close()
            ROUTERS.ended(model.settings.deployment, exchange.unique_id, charge.end)

    def _parsed(
        self, caller: Caller, scope: Scope, body: bytes, exchange: Exchange
    ) -> tuple[Model, RelayedRequest, int]:
        """The model of a request, the request for its replicas, and about how long its prompt is.

        The parsed body is released on return, unless its content is logged. Raises RequestError.
        """
        fields = parse_fields(body)
        model = find_model(self._models, fields.get("model"), caller, needed=True)
        exchange.begin(model.settings.name, fields)
        chars = checked_prompt(fields, caller, self._settings.limits.max_prompt_chars)
        terms = _terms(caller, model, exchange)
        request = _relayed(exchange, scope, body, terms, _hint(fields, caller))
        # The hint is about the first of several prompts.
        return model, request, max(request.hint.prompt_tokens, prompt_tokens(chars))

    async def _describe(self, caller: Caller, request: RelayedRequest, exchange: Exchange) -> None:
        """Answer what is asked about the server; takes no place at the replicas."""
        wait_s = self._settings.models_wait_s
        if request.path == MODELS_PATH:
            models = {
                name: model.replicas for name, model in self._models.items() if caller.may_use(name)
            }
            answer = await self._list.answer(models, request, wait_s)
        else:
            # A call to a sleeping model would start a replica.
            awake = {
                name: model for name, model in self._models.items() if model.replicas.num_running
            }
            model = find_model(awake or self._models, None, caller, needed=False)
            exchange.begin(model.settings.name, {})
            answer = await self._descriptions.answer(model.replicas, request, wait_s)
        exchange.rate_headers = await caller.rate_headers()
        await send_whole(exchange.send, answer)

    async def _answer_health(self, send: Send) -> None:
        if await self._is_healthy():
            await send_whole(send, AnswerStart(200, [JSON_TYPE], b'{"status":"ok"}'))
        else:
            await send_error(send, no_replica())

    def _follow_replicas(self) -> None:
        """Keep the models' room in step with the replicas that run, as their routers see them."""
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
    """Call from whatever executor in the gateway's own."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, name, count)


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    """Ray Serve runs the lifespan of every ingress; there is nothing to set up here."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _terms(caller: Caller, model: Model, exchange: Exchange) -> RequestTerms:
    return RequestTerms(
        request_id=exchange.unique_id,
        priority=caller.key.priority if caller.key else 0,
        key=caller.key.name if caller.key else None,
        key_max_threads=model.max_threads_of(caller),
        cache_salt=caller.cache_salt,
    )


def _hint(fields: dict[str, Any], caller: Caller) -> RequestHint:
    salt, given = caller.cache_salt, fields.get("cache_salt")
    if isinstance(given, str):
        salt = given if salt is None else salt_within(salt, given)
    return request_hint(fields, salt)


def _relayed(
    exchange: Exchange,
    scope: Scope,
    body: bytes,
    terms: RequestTerms = _NO_TERMS,
    hint: RequestHint = _NO_HINT,
) -> RelayedRequest:
    headers = [item for item in scope["headers"] if item[0] in _PASSED_HEADERS]
    headers.append((REQUEST_ID, exchange.request_id.encode()))
    return RelayedRequest(
        scope["method"], scope["path"], scope["query_string"], headers, body, terms, hint
    )
