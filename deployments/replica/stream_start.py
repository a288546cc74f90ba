"""Streams that start with their first output, so that an error before it keeps its status.

vLLM checks a request's parameters when the engine is asked for the first output. A stream has its
status 200 by then, and the error becomes an event of it.
"""

import functools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

_ERROR = 'data: {"error"'
# Events that the Responses API sends before the engine has the request.
_PREAMBLE = ("response.created", "response.in_progress")
HANDLERS = {
    "openai_serving_chat": "create_chat_completion",
    "openai_serving_completion": "create_completion",
    "openai_serving_responses": "create_responses",
    # Its own method converts what this one returns.
    "anthropic_serving_messages": "create_chat_completion",
}
"""Attributes of the application's state, and their methods that return an answer or a stream."""


def start_streams_late(state: Any) -> None:
    """Let vLLM's handlers return a stream when it has its first output, or the error instead."""
    for name, method in HANDLERS.items():
        handler = getattr(state, name, None)
        if handler is not None:
            setattr(handler, method, _started(handler, getattr(handler, method)))


def _started(handler: Any, create: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(create)
    async def started(*args: Any, **kwargs: Any) -> Any:
        stream = await create(*args, **kwargs)
        if not isinstance(stream, AsyncGenerator):
            return stream
        begin: list[Any] = []
        try:
            async for item in stream:
                begin.append(item)
                if getattr(item, "type", None) not in _PREAMBLE:
                    break
        except BaseException:
            await stream.aclose()
            raise
        if begin and isinstance(begin[-1], str) and begin[-1].startswith(_ERROR):
            await stream.aclose()
            error = json.loads(begin[-1].removeprefix("data: "))["error"]
            return handler.create_error_response(
                error["message"],
                err_type=error["type"],
                status_code=HTTPStatus(error["code"]),
                param=error.get("param"),
            )
        return _continued(begin, stream)

    return started


async def _continued(begin: list[Any], stream: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
    try:
        while begin:
            yield begin.pop(0)
        async for item in stream:
            yield item
    finally:
        await stream.aclose()
