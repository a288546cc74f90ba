"""Reads a request's body, within its limits."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import Receive

from apar_core.errors import CapacityError, RequestError

MESSAGE_FIELDS = ("tool_calls", "reasoning", "reasoning_content")
"""What a message may hold besides its content."""
PART_FIELDS = ("text", "refusal", "thinking")
"""The texts of a part of a message's content."""


def texts_in(value: Any) -> Iterator[str]:
    """Every name and value, in an order that depends on the piece alone; without punctuation."""
    # No recursion: a client's JSON may be nested deeper than Python's stack.
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            left.extend(item.values())
            left.extend(item)
        elif isinstance(item, list):
            left.extend(reversed(item))
        elif item is not None:
            yield str(item)


# What a token id stands for, as a rule of thumb.
_CHARS_PER_TOKEN = 4


# Parsing stops every stream of the gateway, and then those of a replica. A body of 16 MiB may hold
# millions of values, each of them larger in memory than in JSON.
MAX_VALUES = 2**18
MAX_CONTAINERS = 10_000
# Reading an integer takes time that is quadratic in its digits.
MAX_NUMBER_CHARS = 40
_RETRY_AFTER_S = 1.0


class BodyTooLargeError(RequestError):
    """The request's body is over a limit: HTTP 413."""


class BodyTimeoutError(RequestError):
    """The request's body has not come in time: HTTP 408."""


class PromptTooLongError(RequestError):
    """The prompt is over the limit of its characters: HTTP 400."""


class BodyBudget:
    """Bytes of bodies that a gateway may hold for all its requests together.

    A key may hold as much as is still free, so that none can take what the others need: one alone
    holds half, two hold a third each. Callers without a key share everything. Source: Choudhury and
    Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (1998).
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held_bytes: Counter[str | None] = Counter()

    @property
    def num_held_bytes(self) -> int:
        """Bytes held now."""
        return self._held_bytes.total()

    @contextmanager
    def hold(self, key: str | None) -> Iterator["HeldBody"]:
        """The part of one request of a key, None without one; empty, and given back at the end."""
        held = HeldBody(self, key)
        try:
            yield held
        finally:
            self._give_back(key, held.num_bytes)

    def take(self, key: str | None, num_bytes: int) -> None:
        """Count more bytes; raises CapacityError where there is no room for them."""
        num_held_bytes = self.num_held_bytes
        own = 0 if key is None else self._held_bytes[key]
        if own + num_bytes > self.max_bytes - num_held_bytes:
            whose = "" if key is None else f", those of key {key} {own}"
            raise CapacityError(
                f"The bodies of all requests take {num_held_bytes} of {self.max_bytes} bytes"
                f"{whose}; please try again.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._held_bytes[key] += num_bytes

    def _give_back(self, key: str | None, num_bytes: int) -> None:
        self._held_bytes[key] -= num_bytes
        if not self._held_bytes[key]:
            del self._held_bytes[key]


class HeldBody:
    """The bytes of one request's body, as its budget counts them."""

    def __init__(self, budget: BodyBudget, key: str | None) -> None:
        self._budget = budget
        self._key = key
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count more bytes; raises CapacityError where the budget has no room for them."""
        self._budget.take(self._key, num_bytes)
        self.num_bytes += num_bytes


async def read_body(receive: Receive, max_bytes: int, held: HeldBody, *, timeout_s: float) -> bytes:
    """The whole body, counted in `held`.

    Raises BodyTooLargeError as soon as it is over the limit, BodyTimeoutError where it has not come
    within `timeout_s`, and CapacityError where the bodies of all requests take too much.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, max_bytes, held)
    except TimeoutError as error:
        raise BodyTimeoutError(
            f"The body did not arrive within {timeout_s:g} s; {held.num_bytes} bytes came."
        ) from error


async def _read(receive: Receive, max_bytes: int, held: HeldBody) -> bytes:
    pieces: list[bytes] = []
    room = max_bytes
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        room -= len(pieces[-1])
        if room < 0:
            raise BodyTooLargeError(f"The body is larger than {max_bytes} bytes.")
        held.add(len(pieces[-1]))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return b"".join(pieces)


def parse_fields(body: bytes) -> dict[str, Any]:
    """The fields of a body; raises RequestError if it is no JSON object.

    Raises BodyTooLargeError, before anything is parsed, if it holds too many values.
    """
    _check_values(body)
    try:
        # Left to itself, `json` also reads UTF-16 and UTF-32, whose values were not counted.
        text = body.decode("utf-8-sig", "surrogatepass")
        fields = json.loads(text, parse_int=_number(int), parse_float=_number(float))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    return fields


def _number(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of numbers that raises RequestError for one of too many characters."""

    def parse(text: str) -> Any:
        if len(text) > MAX_NUMBER_CHARS:
            raise RequestError(
                f"The body holds a number of {len(text)} characters, more than {MAX_NUMBER_CHARS}."
            )
        return kind(text)

    return parse


def _check_values(body: bytes) -> None:
    """Raise BodyTooLargeError for a body of more values than it may hold."""
    # Nearly all bodies are below the limits even if the contents of strings count as values.
    num_containers, num_values = _count_values(body)
    if num_containers <= MAX_CONTAINERS and num_values <= MAX_VALUES:
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Each string is a value, or the name of one.
    num_strings = unescaped.count(b'"') // 2
    if num_strings > 2 * MAX_VALUES:
        raise BodyTooLargeError(
            f"The body holds {num_strings} strings, more than {2 * MAX_VALUES}."
        )
    num_containers, num_values = _count_values(b"".join(unescaped.split(b'"')[::2]))
    if num_containers > MAX_CONTAINERS:
        raise BodyTooLargeError(
            f"The body holds {num_containers} objects and lists, more than {MAX_CONTAINERS}."
        )
    if num_values > MAX_VALUES:
        raise BodyTooLargeError(f"The body holds {num_values} values, more than {MAX_VALUES}.")


def _count_values(text: bytes) -> tuple[int, int]:
    """Objects and lists, and values, of JSON without strings; each may be too high, never too low.

    Every value but the first of its object or list follows a comma.
    """
    num_containers = text.count(b"{") + text.count(b"[")
    return num_containers, num_containers + text.count(b",")


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
