"""Reads a request's body, within its limits."""

import json
from typing import Any

from apar_core.errors import RequestError
from deployments.asgi_relay import Receive
from deployments.nested_text import MESSAGE_FIELDS, PART_FIELDS, texts_in

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


def prompt_chars(fields: dict[str, Any]) -> dict[str, int]:
    """Characters of a prompt by the fields that hold it, of all messages and all prompts together.

    Whatever is there counts: which of `messages` and `prompt` is read depends on the route.
    """
    messages = fields.get("messages")
    chars = {
        "messages": sum(map(_message_chars, messages)) if isinstance(messages, list) else 0,
        "prompt": _chars(fields.get("prompt")),
        "tools": _json_chars(fields.get("tools")),
        "documents": _json_chars(fields.get("documents")),
    }
    return {name: num for name, num in chars.items() if num}


def check_prompt(chars: dict[str, int], max_chars: int | None, name: str) -> None:
    """Raise PromptTooLongError for a prompt over the limit, if any, which is called `name`."""
    num_chars = sum(chars.values())
    if max_chars is not None and num_chars > max_chars:
        params = " and ".join(f"`{param}`" for param in chars)
        raise PromptTooLongError(
            f"{params} {'holds' if len(chars) == 1 else 'hold'} {num_chars} characters; "
            f"{name} is {max_chars}.",
            param=max(chars, key=lambda param: chars[param]),
        )


def prompt_tokens(chars: dict[str, int]) -> int:
    """A rough number of tokens of a prompt of so many characters."""
    return -(-sum(chars.values()) // _CHARS_PER_TOKEN)


def _message_chars(message: Any) -> int:
    if not isinstance(message, dict):
        return 0
    return _chars(message.get("content")) + sum(
        _json_chars(message.get(name)) for name in MESSAGE_FIELDS
    )


def _json_chars(value: Any) -> int:
    return sum(map(len, texts_in(value)))


def _chars(content: Any, depth: int = 2) -> int:
    """Characters of a text, of the texts among the parts of a message, or of a list of prompts."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, int):
        return _CHARS_PER_TOKEN
    if isinstance(content, dict):
        return sum(_chars(content.get(name), 0) for name in PART_FIELDS)
    # Nothing that vLLM takes is nested deeper, and a body may be nested without end.
    if isinstance(content, list) and depth:
        return sum(_chars(item, depth - 1) for item in content)
    return 0
