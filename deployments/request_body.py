"""Reads a request's body, within its limits."""

import json
from typing import Any

from apar_core.errors import RequestError
from deployments.asgi_relay import Receive

# What a token id stands for, as a rule of thumb.
_CHARS_PER_TOKEN = 4


class BodyTooLargeError(RequestError):
    """The request's body is over the limit: HTTP 413."""


class PromptTooLongError(RequestError):
    """The prompt is over the limit of its characters: HTTP 400."""


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The whole body; raises BodyTooLargeError as soon as it is over the limit."""
    pieces: list[bytes] = []
    room = max_bytes
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        room -= len(pieces[-1])
        if room < 0:
            raise BodyTooLargeError(f"The body is larger than {max_bytes} bytes.")
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return b"".join(pieces)


def parse_fields(body: bytes) -> dict[str, Any]:
    """The fields of a body; raises RequestError if it is no JSON object."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    return fields


def prompt_chars(fields: dict[str, Any]) -> tuple[str, int]:
    """The field that holds the prompt, and its length in characters, of all messages together."""
    messages = fields.get("messages")
    if isinstance(messages, list):
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        return "messages", sum(map(_chars, contents))
    return "prompt", _chars(fields.get("prompt"))


def check_prompt(fields: dict[str, Any], max_chars: int, name: str) -> None:
    """Raise PromptTooLongError for a prompt over the limit, which is called `name`."""
    param, num_chars = prompt_chars(fields)
    if num_chars > max_chars:
        raise PromptTooLongError(
            f"`{param}` holds {num_chars} characters; {name} is {max_chars}.", param=param
        )


def _chars(content: Any, depth: int = 2) -> int:
    """Characters of a text, of the texts among the parts of a message, or of a list of prompts."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, int):
        return _CHARS_PER_TOKEN
    if isinstance(content, dict):
        return _chars(content.get("text"), 0)
    # Nothing that vLLM takes is nested deeper, and a body may be nested without end.
    if isinstance(content, list) and depth:
        return sum(_chars(item, depth - 1) for item in content)
    return 0
