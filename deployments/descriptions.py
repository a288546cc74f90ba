"""What a replica says of the server: its version and the description of its API."""

import asyncio
from http import HTTPStatus

from deployments.answer_parts import AnswerStart
from deployments.answers import ReplicaCalls, whole_answer
from deployments.asgi_relay import RelayedRequest
from deployments.error_responses import no_replica


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
