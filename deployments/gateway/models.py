"""The list of all models, as their replicas describe them."""

import asyncio
import json
import math
import time
from collections.abc import Collection
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from apar_core.errors import RequestError
from deployments.gateway.callers import Caller
from deployments.gateway.fair_queue import Account, FairQueue, QueueState, Ticket
from deployments.gateway.settings import ServedModel
from deployments.relay.relay import ReplicaCalls, whole_answer
from deployments.wire.answer import AnswerStart
from deployments.wire.errors import JSON_TYPE, no_replica
from deployments.wire.request import RelayedRequest


class UnknownModelError(RequestError):
    """The request names a model that is not served here, or not to its caller: HTTP 404."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown model {name}", param="model")
        self.name = name


class Model:
    """A served model: its replicas, and who may go to them in which order."""

    def __init__(self, settings: ServedModel, replicas: ReplicaCalls) -> None:
        self.settings = settings
        self.replicas = replicas
        # None until the router knows, which it does with the first request.
        self._num_running: int | None = None
        self._accounts: dict[str, Account] = {}
        self._queue = FairQueue(
            capacity=self._capacity,
            max_waiting=settings.max_queued,
            max_wait_s=settings.max_queue_s,
        )

    def reconfigure(self, settings: ServedModel, replicas: ReplicaCalls) -> None:
        """Take new settings; requests that run or wait go on."""
        self.settings = settings
        self.replicas = replicas
        self._queue.configure(
            capacity=self._capacity,
            max_waiting=settings.max_queued,
            max_wait_s=settings.max_queue_s,
        )

    def replicas_changed(self, num_running: int) -> None:
        """Make room for as many requests as this many replicas run."""
        # 0 before the first replica is known; a model that has lost all of them waits for one.
        if num_running or self._num_running is not None:
            self._num_running = num_running
            self._queue.resize(self._capacity)

    @property
    def state(self) -> QueueState:
        """How the model's queue stands."""
        return self._queue.state

    async def enter(self, caller: Caller) -> Ticket:
        """A place at the replicas, when the caller's turn comes; raises as `FairQueue.enter`."""
        account = self._accounts.get(caller.name)
        if account is None:
            account = self._accounts[caller.name] = Account(caller.name)
        if caller.key is not None:
            account.priority = caller.key.priority
            account.weight = caller.key.weight
            # Each request has a thread at least.
            account.max_running = caller.key.max_threads
        return await self._queue.enter(account)

    def max_threads_of(self, caller: Caller) -> int | None:
        """The caller's share of one replica: its threads, spread evenly over all that run."""
        if caller.key is None or caller.key.max_threads is None:
            return None
        return math.ceil(caller.key.max_threads / max(1, self._replicas))

    @property
    def _replicas(self) -> int:
        return self.settings.replicas if self._num_running is None else self._num_running

    @property
    def _capacity(self) -> int:
        return self._replicas * self.settings.requests_per_replica


def find_model(models: dict[str, Model], name: object, caller: Caller, *, needed: bool) -> Model:
    """The model that a request names; without a name, the only one that its caller may use.

    Raises UnknownModelError and RequestError. Where no name is `needed`, any model will do.
    """
    usable = [known for known in models if caller.may_use(known)]
    if name is None and usable:
        if needed and len(usable) > 1:
            served = ", ".join(usable)
            raise RequestError(f"`model` is missing; served here: {served}", param="model")
        return models[usable[0]]
    if not isinstance(name, str | None):
        raise RequestError("`model` must be a string", param="model")
    if name not in usable:
        raise UnknownModelError(name or "")
    return models[name]


class Descriptions:
    """Asks a replica for each description once, then answers for it.

    A description does not change while the gateway runs. At most one request for one is at a
    replica, so these requests cannot take the places of those that generate.
    """

    def __init__(self) -> None:
        self._answers: dict[str, AnswerStart] = {}
        self._asking = asyncio.Lock()

    async def answer(
        self, replicas: ReplicaCalls, request: RelayedRequest, wait_s: float
    ) -> AnswerStart:
        """The answer to a request, or an error where no replica gives one within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s), self._asking:
                known = self._answers.get(request.path)
                if known is None:
                    known = await whole_answer(replicas, request)
                    if known.status == HTTPStatus.OK:
                        self._answers[request.path] = known
                return known
        except TimeoutError:
            answer = no_replica()
            return AnswerStart(answer.status, answer.headers, answer.body)


class ModelList:
    """The model cards: asked of running replicas once, and kept while a model has none.

    A model whose card is not known yet is listed with the fields that OpenAI's API requires. A call
    to a sleeping model would start a replica, so only running ones are asked.
    """

    def __init__(self) -> None:
        self._cards: dict[str, list[Any]] = {}
        self._outdated: set[str] = set()
        self._num_changes = 0
        self._asking = asyncio.Lock()
        self._created_s = int(time.time())

    def models_changed(self, names: Collection[str]) -> None:
        """Forget all but these models, and ask for their cards again once a replica runs."""
        self._cards = {name: cards for name, cards in self._cards.items() if name in names}
        self._outdated = set(self._cards)
        self._num_changes += 1

    async def answer(
        self, models: dict[str, ReplicaCalls], request: RelayedRequest, wait_s: float
    ) -> AnswerStart:
        """The list of these models.

        Waits at most `wait_s` for replicas to describe them, and as long for others who ask them.
        """
        if self._to_ask(models):
            with suppress(TimeoutError):
                await self._ask_in_turn(models, request, wait_s)
        cards = [card for name in models for card in self._cards.get(name) or [self._least(name)]]
        body = json.dumps({"object": "list", "data": cards}).encode()
        return AnswerStart(HTTPStatus.OK, [JSON_TYPE], body)

    def _to_ask(self, models: dict[str, ReplicaCalls]) -> list[str]:
        return [
            name
            for name, replicas in models.items()
            if replicas.num_running and (name not in self._cards or name in self._outdated)
        ]

    async def _ask_in_turn(
        self, models: dict[str, ReplicaCalls], request: RelayedRequest, wait_s: float
    ) -> None:
        async with asyncio.timeout(wait_s):
            await self._asking.acquire()
        try:
            await self._ask(models, request, wait_s)
        finally:
            self._asking.release()

    async def _ask(
        self, models: dict[str, ReplicaCalls], request: RelayedRequest, wait_s: float
    ) -> None:
        asked, num_changes = self._to_ask(models), self._num_changes
        answers = await asyncio.gather(
            *(_described(models[name], request, wait_s) for name in asked)
        )
        if num_changes != self._num_changes:
            return  # The cards are those of models before a change.
        for name, cards in zip(asked, answers, strict=True):
            if cards is not None:
                self._cards[name] = cards
                self._outdated.discard(name)

    def _least(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created_s, "owned_by": "vllm"}


async def _described(
    replicas: ReplicaCalls, request: RelayedRequest, wait_s: float
) -> list[Any] | None:
    """The cards that a model's replicas give; None where they do not answer in time."""
    try:
        async with asyncio.timeout(wait_s):
            answer = await whole_answer(replicas, request)
    except TimeoutError:
        return None
    if answer.status != HTTPStatus.OK:
        return None
    cards: list[Any] = json.loads(answer.body)["data"]
    return cards
