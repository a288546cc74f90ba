"""The list of all models, as their replicas describe them."""

import asyncio
import json
import time
from collections.abc import Collection
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from deployments.answer_parts import AnswerStart
from deployments.answers import ReplicaCalls, whole_answer
from deployments.asgi_relay import RelayedRequest
from deployments.error_responses import JSON_TYPE


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
