"""The list of all models, as their replicas describe them."""

import asyncio
import json
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from deployments.answer_parts import AnswerStart
from deployments.answers import ReplicaCalls, whole_answer
from deployments.asgi_relay import RelayedRequest
from deployments.error_responses import JSON_TYPE, no_replica


class ModelList:
    """Asks the replicas of each model once what they say of it."""

    def __init__(self) -> None:
        self._cards: dict[str, list[Any]] = {}

    def forget(self, names: Iterable[str]) -> None:
        """Forget what is known of models that have changed."""
        for name in names:
            self._cards.pop(name, None)

    async def answer(
        self, models: dict[str, ReplicaCalls], request: RelayedRequest, wait_s: float
    ) -> AnswerStart:
        """The list of these models.

        A model whose replicas cannot answer within `wait_s` is left out; if none can, the error of
        one of them is the answer.
        """
        unknown = [name for name in models if name not in self._cards]
        answers = await asyncio.gather(
            *(_described(models[name], request, wait_s) for name in unknown)
        )
        for name, answer in zip(unknown, answers, strict=True):
            if answer.status == HTTPStatus.OK:
                self._cards[name] = json.loads(answer.body)["data"]
        if answers and not any(name in self._cards for name in models):
            return answers[0]
        cards = [card for name in models for card in self._cards.get(name, ())]
        body = json.dumps({"object": "list", "data": cards}).encode()
        return AnswerStart(HTTPStatus.OK, [JSON_TYPE], body)


async def _described(replicas: ReplicaCalls, request: RelayedRequest, wait_s: float) -> AnswerStart:
    try:
        async with asyncio.timeout(wait_s):
            return await whole_answer(replicas, request)
    except TimeoutError:
        answer = no_replica()
        return AnswerStart(answer.status, answer.headers, answer.body)
