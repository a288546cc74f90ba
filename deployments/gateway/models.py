"""The served models: their replicas, queues and model cards."""

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from apar_core.errors import RequestError
from deployments.gateway.accounts import ONE, QueuedKey, Size
from deployments.gateway.callers import Caller
from deployments.gateway.fair_queue import Due, FairQueue, QueueState, Ticket
from deployments.gateway.settings import ServedModel
from deployments.gateway.shared_slots import Need, SharedSlots
from deployments.relay.relay import ModelReplicas, ReplicaCalls, whole_response
from deployments.wire.errors import JSON_TYPE, UnknownModelError
from deployments.wire.request import RelayedRequest
from deployments.wire.response import ResponseStart


class CachedResponse:
    """A response that a replica gives once and the gateway then repeats.

    At most one request for it is at a replica at a time, so these requests cannot crowd out those
    that generate. `answer` is the latest response, None before the first.
    """

    def __init__(self, outdated: ResponseStart | None = None) -> None:
        """`outdated` is an earlier response, repeated only until a replica can be asked again."""
        self.answer = outdated
        self._is_current = False
        self._lock = asyncio.Lock()

    async def ask(
        self, replicas: ReplicaCalls, request: RelayedRequest, wait_s: float
    ) -> ResponseStart:
        """Return the response or a replica's error. Raises TimeoutError after `wait_s`."""
        async with asyncio.timeout(wait_s), self._lock:
            if self._is_current and self.answer is not None:
                return self.answer
            answer = await whole_response(replicas, request)
            if answer.status == HTTPStatus.OK:
                self.answer, self._is_current = answer, True
            return answer


class Model:
    """A served model: its replicas, and the queue in front of them."""

    def __init__(
        self,
        settings: ServedModel,
        replicas: ModelReplicas,
        slots: SharedSlots | None = None,
    ) -> None:
        """`slots` are the leases of this gateway if it is one of several."""
        self._slots = slots
        self.settings = settings
        self.replicas = replicas
        self.card = CachedResponse()
        self.descriptions: defaultdict[str, CachedResponse] = defaultdict(CachedResponse)
        # Unknown until the model's router has seen a request.
        self._num_running: int | None = None
        self._queue = FairQueue(
            capacity=self._capacity,
            max_waiting=settings.max_queued,
            max_wait_s=settings.max_queue_s,
        )

    def reconfigure(self, settings: ServedModel, replicas: ModelReplicas) -> None:
        """Apply new settings; running and waiting requests continue."""
        self.settings = settings
        self.replicas = replicas
        # A response still on its way to the old card describes the model before the change.
        self.card = CachedResponse(self.card.answer)
        self.descriptions.clear()
        self._queue.configure(
            capacity=self._capacity,
            max_waiting=settings.max_queued,
            max_wait_s=settings.max_queue_s,
        )

    def replicas_changed(self, num_running: int) -> None:
        """Resize the queue to the number of running replicas."""
        # 0 before the first replica is known; a model that has lost all of them waits for one.
        if num_running or self._num_running is not None:
            self._num_running = num_running
            self._queue.resize(self._capacity)

    @property
    def state(self) -> QueueState:
        """State of the model's queue."""
        return self._queue.state

    @property
    def has_lost_all(self) -> bool:
        """Whether all replicas are lost; false for a model that may be scaled to zero."""
        return self._num_running == 0 and self.settings.wanted > 0

    @property
    def heard_s(self) -> float:
        """Time of the last tokens, by `time.monotonic()`."""
        return self._queue.heard_s

    async def enter(
        self,
        caller: Caller,
        priority: int = 0,
        due: Due | None = None,
        max_wait_s: float | None = None,
        size: Size = ONE,
    ) -> Ticket:
        """Wait for a request's slots at the replicas. Raises like `FairQueue.enter`."""
        account = self._queue.account_of(caller.name, priority)
        key = account.key
        if caller.key is not None:
            key.weight = caller.key.weight
            # Each sequence has at least one thread.
            key.cap = caller.key.max_threads
            key.max_running = self._slots_of(key)
        if self._slots is not None and not (key.has_room(size) and self._queue.has_room(size)):
            # The renewal runs in another task, by which time this request waits in the queue.
            self._slots.hurry()
        return await self._queue.enter(account, due, max_wait_s, size)

    def share(self, slots: SharedSlots | None) -> None:
        """Use these leases from now on; None if this is the only gateway."""
        self._slots = slots
        self.take_slots()

    def needs(self) -> dict[str, Need]:
        """Return this gateway's needs for slots that all gateways share."""
        state, name = self._queue.state, self.settings.deployment
        needs = {name: Need(self._all_slots, state.num_sequences, state.num_startable)}
        for key in self._queue.keys:
            if key.cap is not None and (key.num_running or key.num_waiting):
                needs[f"{name}/{key.name}"] = Need(key.cap, key.num_running, key.waiting_sequences)
        return needs

    def take_slots(self) -> None:
        """Apply the current leases, and start the requests that they have room for."""
        for key in self._queue.keys:
            key.max_running = self._slots_of(key)
        self._queue.resize(self._capacity)

    def _slots_of(self, key: QueuedKey) -> int | None:
        if self._slots is None or key.cap is None:
            return key.cap
        return self._slots.of(f"{self.settings.deployment}/{key.name}", key.cap)

    def max_threads_of(self, caller: Caller) -> int | None:
        """Return the caller's cap on threads per replica, spread evenly; None without a cap."""
        if caller.key is None or caller.key.max_threads is None:
            return None
        return math.ceil(caller.key.max_threads / max(1, self._replicas))

    @property
    def max_sequences(self) -> int:
        """Maximum number of sequences of one request: what one replica may run."""
        return self.settings.requests_per_replica

    @property
    def _replicas(self) -> int:
        return self.settings.replicas if self._num_running is None else self._num_running

    @property
    def _all_slots(self) -> int:
        """Maximum number of running sequences on all replicas, for all gateways together."""
        return self._replicas * self.settings.requests_per_replica

    @property
    def _capacity(self) -> int:
        if self._slots is None:
            return self._all_slots
        return self._slots.of(self.settings.deployment, self._all_slots)


def by_name(models: Iterable[Model]) -> dict[str, Model]:
    """Return the models by the names that requests may give: their own, and their adapters'."""
    return {
        name: model for model in models for name in (model.settings.name, *model.settings.adapters)
    }


def find_model(models: Mapping[str, Model], name: object, caller: Caller, *, needed: bool) -> Model:
    """Return the model that a request names or, without a name, the caller's only model.

    `models` comes from `by_name`. Unless `needed`, any of the caller's models will do. Raises
    UnknownModelError and RequestError.
    """
    usable = [known for known in models if caller.may_use(known)]
    if name is None and usable:
        # A request without a name reaches the replica's model and none of its adapters.
        unnamed = [known for known in usable if known == models[known].settings.name]
        if needed and len(unnamed) != 1:
            served = ", ".join(usable)
            raise RequestError(f"`model` is missing; served here: {served}", param="model")
        return models[(unnamed or usable)[0]]
    if not isinstance(name, str | None):
        raise RequestError("`model` must be a string", param="model")
    if name not in usable:
        raise UnknownModelError(name or "", usable)
    return models[name]


async def list_models(
    models: Mapping[str, Model],
    request: RelayedRequest,
    wait_s: float,
    *,
    created_s: int,
    aliases: Mapping[str, str] | None = None,
) -> ResponseStart:
    """Return the list of models, with the model cards that their replicas return.

    `models` are those of `by_name` that the caller may use; `aliases` may name them or others. If
    no replica answers within `wait_s` and no card is known, the model gets only the fields that
    OpenAI's API requires. Only running replicas are asked: a call to a sleeping model would start
    one.
    """
    served = list(dict.fromkeys(models.values()))
    cards = await asyncio.gather(*(_cards(model, request, wait_s) for model in served))
    known = {card["id"]: card for each in cards for card in each}
    data = [
        known.get(name) or _plain_card(name, model, created_s) for name, model in models.items()
    ]
    by_id = {card["id"]: card for card in data}
    data += [
        by_id[name] | {"id": alias, "alias_of": name}
        for alias, name in (aliases or {}).items()
        if name in by_id
    ]
    body = json.dumps({"object": "list", "data": data}).encode()
    return ResponseStart(HTTPStatus.OK, [JSON_TYPE], body)


def card_of(name: str, listed: ResponseStart) -> ResponseStart:
    """Return one model of the list that `list_models` returned. Raises UnknownModelError."""
    cards = {card["id"]: card for card in json.loads(listed.body)["data"]}
    if name not in cards:
        raise UnknownModelError(name, list(cards))
    return ResponseStart(HTTPStatus.OK, [JSON_TYPE], json.dumps(cards[name]).encode())


async def describe(
    models: Sequence[Model], request: RelayedRequest, wait_s: float
) -> ResponseStart | None:
    """Return the replicas' response to a request about the server; None if none responds.

    OpenAPI descriptions are merged: each replica describes the routes that its model serves.
    """
    answers = await asyncio.gather(
        *(
            model.descriptions[request.path].ask(model.replicas, request, wait_s)
            for model in models
        ),
        return_exceptions=True,
    )
    given = [answer for answer in answers if isinstance(answer, ResponseStart)]
    for error in answers:
        if not isinstance(error, ResponseStart | TimeoutError):
            raise error
    found = [answer for answer in given if answer.status == HTTPStatus.OK]
    if len(found) > 1:
        body = json.dumps(_merged([json.loads(answer.body) for answer in found])).encode()
        return ResponseStart(HTTPStatus.OK, [JSON_TYPE], body)
    return next(iter(found or given), None)


def _merged(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge OpenAPI descriptions, preferring operations that describe their request body."""
    whole, *others = documents
    for other in others:
        for path, operations in other["paths"].items():
            known = whole["paths"].setdefault(path, {})
            for method, operation in operations.items():
                if "requestBody" in operation and "requestBody" not in known.get(method, {}):
                    known[method] = operation
        schemas = whole["components"]["schemas"]
        whole["components"]["schemas"] = other["components"]["schemas"] | schemas
    return whole


def _plain_card(name: str, model: Model, created_s: int) -> dict[str, Any]:
    card = {"id": name, "object": "model", "created": created_s, "owned_by": "vllm"}
    return card if name == model.settings.name else card | {"parent": model.settings.name}


async def _cards(model: Model, request: RelayedRequest, wait_s: float) -> list[Any]:
    card = model.card
    if model.replicas.num_running:
        with suppress(TimeoutError):
            await card.ask(model.replicas, request, wait_s)
    return [] if card.answer is None else json.loads(card.answer.body)["data"]
