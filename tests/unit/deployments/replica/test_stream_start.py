"""A stream starts with its first output; an error before it is an answer of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.replica.stream_start import HANDLERS, start_streams_late

CREATED, RUNNING = (
    SimpleNamespace(type="response.created"),
    SimpleNamespace(type="response.in_progress"),
)
DELTA = SimpleNamespace(type="response.output_text.delta")
ERROR = {"message": "wrong", "type": "BadRequestError", "param": "logit_bias", "code": 400}
FAILED = f"data: {json.dumps({'error': ERROR})}\n\n"


class Handler:
    """Answers with the items; an exception among them is raised."""

    def __init__(self, *items: Any) -> None:
        self._items = items
        self.sent: list[Any] = []
        self.closed = False

    async def create(self, *, stream: bool = True) -> Any:
        return self._stream() if stream else "whole"

    async def _stream(self) -> AsyncGenerator[Any, None]:
        try:
            for item in self._items:
                if isinstance(item, Exception):
                    raise item
                self.sent.append(item)
                yield item
        finally:
            self.closed = True

    def create_error_response(
        self, message: str, *, err_type: str, status_code: HTTPStatus, param: str | None
    ) -> dict[str, Any]:
        return {"message": message, "type": err_type, "code": status_code, "param": param}


def started(handler: Handler) -> Callable[..., Any]:
    method = HANDLERS["openai_serving_chat"]
    setattr(handler, method, handler.create)
    start_streams_late(SimpleNamespace(openai_serving_chat=handler))
    create: Callable[..., Any] = getattr(handler, method)
    return create


async def test_a_stream_that_begins_with_an_error_is_that_error() -> None:
    handler = Handler(FAILED, "data: [DONE]\n\n")

    answer = await started(handler)()

    assert answer == ERROR
    assert handler.closed


async def test_an_exception_before_the_first_output_is_raised_instead_of_a_stream() -> None:
    handler = Handler(CREATED, RUNNING, ValueError("wrong"))

    with pytest.raises(ValueError, match="wrong"):
        await started(handler)()

    assert handler.closed


@pytest.mark.parametrize(
    ("items", "num_early"),
    [((CREATED, RUNNING, DELTA, DELTA), 3), (("a", "b", FAILED), 1), ((), 0), ((CREATED,), 1)],
)
async def test_a_stream_with_output_is_sent_as_it_comes(
    items: tuple[Any, ...], num_early: int
) -> None:
    handler = Handler(*items)

    stream = await started(handler)()

    assert len(handler.sent) == num_early
    assert tuple([item async for item in stream]) == items


async def test_a_client_that_leaves_ends_the_stream() -> None:
    handler = Handler("a", "b", "c")

    async with aclosing(await started(handler)()) as stream:
        assert await anext(stream) == "a"

    assert handler.closed
    assert handler.sent == ["a"]


async def test_a_whole_answer_is_left_alone() -> None:
    assert await started(Handler())(stream=False) == "whole"
