"""Request bodies: received within limits, parsed once, and the fields that the gateway reads."""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from starlette.types import Receive

from apar_core.errors import CapacityError, RequestError
from deployments.gateway.codings import Decoder, decoder_of
from deployments.gateway.request_options import NO_OPTIONS, RequestOptions
from deployments.wire.errors import BodyTimeoutError, BodyTooLargeError, PromptTooLongError
from deployments.wire.request import RequestHint
from deployments.wire.response import Headers
from deployments.wire.routes import OPENAI_SHAPE, BodyShape

# Parsing blocks every stream of the gateway, and later those of a replica. A body of 16 MiB may
# hold millions of values, each of which is larger in memory than in JSON.
MAX_VALUES = 2**18
MAX_CONTAINERS = 10_000
# Parsing an integer takes time quadratic in its digits.
MAX_NUMBER_CHARS = 40
_RETRY_AFTER_S = 1.0
_CHARS_PER_TOKEN = 4
# A chat template's own tokens around each message.
_TOKENS_PER_MESSAGE = 4
# Long pieces are also hashed up to these characters: requests may share only a document's start.
_CUTS = (1024, 4096, 16384, 65536)
# Of more hashes than this, the first and the last ones are kept.
_MAX_HASHES = 16
_MAX_HASHED_IDS = 4096
_MAX_CHOICES = 128
_MAX_TOKENS = 2**31
_SALT_CHARS = 32
_INTEGER = TypeAdapter(int)
# Fields of a message, or of an item of the Responses API, that hold text at any depth.
_MESSAGE_FIELDS = ("tool_calls", "reasoning", "reasoning_content", "name", "arguments", "input")
# Fields of a message, besides its content, that hold a text or a list of parts.
_CONTENT_FIELDS = ("content", "output", "summary")
# Fields of a part: a text, text at any depth, further parts. Images and files are not text.
_PART_FIELDS = ("text", "refusal", "thinking")
_PART_VALUES = ("name", "input")
# Fields that make an answer a single sequence of tokens.
_UNFORKED_FIELDS = ("structured_outputs", "ignore_eos", "min_tokens")
_UNCONTINUED_FIELDS = (
    "echo",
    "return_token_ids",
    "use_beam_search",
    "enable_response_messages",
)


class BodyBudget:
    """Bytes of bodies that a gateway may hold for all its requests and whole responses together.

    A key may hold as much as is still free, so that no key takes what others need: one key alone
    gets half, two keys get a third each. Callers without a key share everything. Source: Choudhury
    and Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (1998).
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
        """Yield the empty share of one request; its bytes are released at the end."""
        held = HeldBody(self, key)
        try:
            yield held
        finally:
            self._held_bytes[key] -= held.num_bytes
            if not self._held_bytes[key]:
                del self._held_bytes[key]

    def take(self, key: str | None, num_bytes: int) -> None:
        """Count more bytes. Raises CapacityError if they do not fit."""
        num_held_bytes = self.num_held_bytes
        own = 0 if key is None else self._held_bytes[key]
        if own + num_bytes > self.max_bytes - num_held_bytes:
            whose = "" if key is None else f", those of key {key} {own}"
            raise CapacityError(
                f"The bodies of all requests and answers take {num_held_bytes} of "
                f"{self.max_bytes} bytes{whose}; please try again.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._held_bytes[key] += num_bytes


class HeldBody:
    """One request's share of a `BodyBudget`."""

    def __init__(self, budget: BodyBudget, key: str | None) -> None:
        self._budget = budget
        self._key = key
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count more bytes. Raises CapacityError if they do not fit into the budget."""
        self._budget.take(self._key, num_bytes)
        self.num_bytes += num_bytes


async def read_body(
    receive: Receive, headers: Headers, max_bytes: int, held: HeldBody, *, timeout_s: float
) -> bytes:
    """Receive the whole body, decode its `Content-Encoding`, and count the result in `held`.

    Raises UnsupportedCodingError for an unknown coding and RequestError for invalid data. Raises
    BodyTooLargeError as soon as the body, compressed or not, exceeds `max_bytes`, and
    BodyTimeoutError if it has not arrived within `timeout_s`. Raises CapacityError if the budget of
    all bodies is used up.
    """
    decoder = decoder_of(headers)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, decoder, max_bytes, held)
    except TimeoutError as error:
        raise BodyTimeoutError(
            f"The body did not arrive within {timeout_s:g} s; {held.num_bytes} bytes arrived."
        ) from error


async def _read(receive: Receive, decoder: Decoder, max_bytes: int, held: HeldBody) -> bytes:
    pieces: list[bytes] = []
    room = received_room = max_bytes
    while True:
        message = await receive()
        received = message.get("body", b"")
        # Compressed data may be endless and decode to nothing.
        received_room -= len(received)
        for piece in decoder.decode(received):
            room -= len(piece)
            if room < 0:
                raise BodyTooLargeError(f"The body is larger than {max_bytes} bytes.")
            held.add(len(piece))
            pieces.append(piece)
        if received_room < 0:
            raise BodyTooLargeError(f"The body is larger than {max_bytes} bytes.")
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            if not decoder.is_complete:
                raise RequestError("The body ends before the end of its compressed data.")
            return b"".join(pieces)


def parse_fields(raw: bytes) -> dict[str, Any]:
    """Return the fields of a JSON object. Raises RequestError, also for too many values."""
    _check_num_values(raw)
    try:
        # By default `json` also reads UTF-16 and UTF-32, whose values were not counted.
        text = raw.decode("utf-8-sig", "surrogatepass")
        fields = json.loads(text, parse_int=_number(int), parse_float=_number(float))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    return fields


def _number(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if len(text) > MAX_NUMBER_CHARS:
            raise RequestError(
                f"The body holds a number of {len(text)} characters, more than {MAX_NUMBER_CHARS}."
            )
        return kind(text)

    return parse


def _check_num_values(raw: bytes) -> None:
    """Raise BodyTooLargeError, before anything is parsed, if a body holds too many values."""
    # Nearly all bodies are below the limits even if the contents of strings count as values.
    num_containers, num_values = _count_values(raw)
    if num_containers <= MAX_CONTAINERS and num_values <= MAX_VALUES:
        return
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Each string is a value or the name of one.
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
    """Return upper bounds for the objects and lists, and for all values, in JSON without strings.

    Every value except the first of its object or list follows a comma.
    """
    num_containers = text.count(b"{") + text.count(b"[")
    return num_containers, num_containers + text.count(b",")


class _Piece(NamedTuple):
    """A piece of the prompt, from the field `field` of the body.

    `role` is the message's. For token ids, `text` is a hash that only identifies them.
    """

    field: str
    role: str
    text: str
    num_chars: int


class RequestBody:
    """A parsed request body; only this class interprets its fields, by the shape of its route.

    Fields may have any type: vLLM validates them later, on the replica. A parsed body takes several
    times its size in bytes, so it is not kept while the request runs, unless its content is logged.
    """

    def __init__(self, raw: bytes, shape: BodyShape = OPENAI_SHAPE) -> None:
        """Parse a body. Raises RequestError, and BodyTooLargeError for too many values."""
        self.fields = parse_fields(raw)
        self._shape = shape

    @property
    def model(self) -> Any:
        """The requested model, None if the body names none."""
        return self.fields.get("model")

    @property
    def streams(self) -> bool:
        """Whether the client asks for a stream."""
        return bool(self.fields.get("stream"))

    @property
    def max_tokens(self) -> int | None:
        """The client's limit on generated tokens, None without a valid one."""
        for name in self._shape.limits:
            value = self.fields.get(name)
            if isinstance(value, int) and 0 < value < _MAX_TOKENS:
                return value
        return None

    @property
    def num_sequences(self) -> int:
        """Number of answers that the request asks for: `n` for each prompt.

        vLLM ignores `best_of`, and beam search has at most `n` beams for each prompt.
        """
        return self._num_answers * max(1, self._num_prompts)

    @property
    def num_choices(self) -> int:
        """`num_sequences`, capped at 128: the router need not know more."""
        return min(self.num_sequences, _MAX_CHOICES)

    @property
    def _num_answers(self) -> int:
        try:
            # As vLLM reads it: a string such as "32" is a number, too.
            return max(1, _INTEGER.validate_python(self.fields.get("n")))
        except ValidationError:
            return 1

    @property
    def _num_prompts(self) -> int:
        embedded = self.fields.get("prompt_embeds")
        return len(self._prompts) + (len(embedded) if isinstance(embedded, list) else 0)

    def check_sequences(self, limit: int, name: str) -> None:
        """Raise RequestError if the request has more sequences than the limit called `name`."""
        if self.num_sequences <= limit:
            return
        field = self._prompts[0][0] if self._prompts else "prompt_embeds"
        parts = {field: self._num_prompts, "n": self._num_answers}
        params = {name: count for name, count in parts.items() if count > 1}
        given = " and ".join(f"`{param}` {count}" for param, count in params.items())
        raise RequestError(
            f"The request asks for {self.num_sequences} sequences (prompts times answers: "
            f"{given}); {name} is {limit}.",
            param=max(params, key=lambda param: params[param]),
        )

    def may_fork(self, *, with_tools: bool = False) -> bool:
        """Return whether the engine would let the request fork; see `ForkInputProcessor`.

        `with_tools`: whether answers that may call tools fork.
        """
        fields = self.fields
        options = fields.get("apar")
        if isinstance(options, dict) and (
            options.get("enabled") is False or options.get("max_threads") == 1
        ):
            return False
        form: Any = fields
        for name in self._shape.answer_format:
            form = form.get(name) if isinstance(form, dict) else None
        if isinstance(form, dict) and form.get("type") != "text":
            return False
        is_free = not self._calls_tools or (with_tools and self._tool_choice in (None, "auto"))
        return is_free and not any(fields.get(name) for name in _UNFORKED_FIELDS)

    @property
    def _calls_tools(self) -> bool:
        return bool(self.fields.get("tools")) and self._tool_choice != "none"

    @property
    def _tool_choice(self) -> Any:
        choice = self.fields.get("tool_choice")
        # Anthropic's form of it is an object.
        return choice.get("type") if isinstance(choice, dict) else choice

    @property
    def can_continue(self) -> bool:
        """Whether another replica can continue the request's stream, as far as HTTP is concerned.

        Continuing skips the characters that the client has, which works for one choice of text. It
        does not work for token ids, tool calls (their arguments come in pieces of JSON), an echoed
        prompt, or several prompts. Whether the engine can continue, the replica reports at the
        start of its answer: see `apar_core/engine/request_follower.py`.
        """
        return (
            not any(self.fields.get(name) for name in _UNCONTINUED_FIELDS)
            and not self._calls_tools
            and len(self._prompts) <= 1
        )

    def cache_salt(self, key_salt: str | None) -> str | None:
        """Return the cache salt to write into the body, given the salt of the caller's key.

        A client's own salt is combined with its key's, so it cannot reach another key's cache.
        None leaves the body unchanged: the caller has no key, or vLLM will refuse the client's salt
        as invalid.
        """
        given = self.fields.get("cache_salt")
        if key_salt is None or given is None:
            return key_salt
        if not isinstance(given, str) or not given:
            return None
        # JSON can carry lone surrogates.
        salt = f"{key_salt}/{given}".encode("utf-8", "surrogatepass")
        return hashlib.sha256(salt).hexdigest()[:_SALT_CHARS]

    @cached_property
    def prompt_chars(self) -> dict[str, int]:
        """Characters of the prompt by field, of all messages and all prompts together.

        A token id counts as four characters.
        """
        chars: Counter[str] = Counter()
        for piece in self._pieces:
            chars[piece.field] += piece.num_chars
        for name, prompt in self._prompts[1:]:
            chars[name] += _num_chars(prompt)
        shape = self._shape
        names = (shape.turns or "", *shape.prompts, *shape.texts)
        return {name: chars[name] for name in names if chars[name]}

    def check_prompt(self, max_chars: int | None, name: str) -> None:
        """Raise PromptTooLongError if the prompt exceeds the limit, if any, called `name`."""
        if max_chars is None or (num_chars := sum(self.prompt_chars.values())) <= max_chars:
            return
        chars = self.prompt_chars
        params = " and ".join(f"`{param}`" for param in chars)
        raise PromptTooLongError(
            f"{params} {'holds' if len(chars) == 1 else 'hold'} {num_chars} characters; "
            f"{name} is {max_chars}.",
            param=max(chars, key=lambda param: chars[param]),
        )

    @property
    def prompt_tokens(self) -> int:
        """Estimated tokens of all prompts together."""
        return -(-sum(self.prompt_chars.values()) // _CHARS_PER_TOKEN)

    def hint(
        self,
        cache_salt: str | None = None,
        adapter: str | None = None,
        options: RequestOptions = NO_OPTIONS,
        *,
        forks_with_tools: bool = False,
    ) -> RequestHint:
        """Return the hint for the router; of several prompts, it describes the first.

        `cache_salt` is what `self.cache_salt` returned. Prompts under different salts, or to
        different LoRA adapters, share no cache and therefore no hash.
        """
        given_salt = self.fields.get("cache_salt")
        if cache_salt is None and isinstance(given_salt, str):
            cache_salt = given_salt
        prefix = hash(cache_salt) if adapter is None else hash((cache_salt, adapter))
        num_tokens = 0
        hashes: list[int] = []
        covered: list[int] = []
        for _, role, text, num_chars in self._pieces:
            num_tokens += _TOKENS_PER_MESSAGE
            prefix = hash((prefix, role))
            begin = 0
            for cut in _CUTS:
                if cut >= num_chars:
                    break
                prefix = hash((prefix, text[begin:cut]))
                hashes.append(prefix)
                covered.append(num_tokens + cut // _CHARS_PER_TOKEN)
                begin = cut
            prefix = hash((prefix, text[begin:]))
            num_tokens += -(-num_chars // _CHARS_PER_TOKEN)
            hashes.append(prefix)
            covered.append(num_tokens)
        return RequestHint(
            prompt_tokens=num_tokens,
            max_tokens=self.max_tokens,
            prefix_hashes=_first_and_last(hashes),
            may_fork=self.may_fork(with_tools=forks_with_tools),
            prefix_tokens=_first_and_last(covered),
            num_choices=self.num_choices,
            expected_tokens=options.expected_tokens,
            # Under the key's salt: no key can shape the forecasts of another.
            family=None
            if options.parent_request_id is None
            else hash((cache_salt, adapter, options.parent_request_id)),
        )

    @cached_property
    def _prompts(self) -> list[tuple[str, Any]]:
        """The prompts with their fields' names, each a text, token ids or an object with text."""
        prompts: list[tuple[str, Any]] = []
        for name in self._shape.prompts:
            given = self.fields.get(name)
            if isinstance(given, list) and given and isinstance(given[0], str | list):
                prompts += [(name, prompt) for prompt in given]
            elif isinstance(given, str | dict) or (isinstance(given, list) and given):
                prompts.append((name, given))
        return prompts

    @cached_property
    def _pieces(self) -> list[_Piece]:
        """Pieces of the first prompt, in the order of a chat template."""
        pieces = []
        for name in self._shape.texts:
            if text := "".join(_texts_in(self.fields.get(name))):
                pieces.append(_Piece(name, name, text, len(text)))
        if self._shape.turns is not None:
            pieces += _turns(self._shape.turns, self.fields.get(self._shape.turns))
        for name, prompt in self._prompts[:1]:
            if _is_ids(prompt):
                ids = [item for item in prompt[:_MAX_HASHED_IDS] if isinstance(item, int)]
                text = repr(hash(tuple(ids)))
            else:
                text = "".join(_texts_in(prompt))
            pieces.append(_Piece(name, "", text, _num_chars(prompt)))
        return pieces


def _turns(field: str, turns: Any) -> Iterator[_Piece]:
    if isinstance(turns, str):
        yield _Piece(field, "user", turns, len(turns))
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict):
            # Items of the Responses API that are not messages have a type instead of a role.
            role, text = turn.get("role", turn.get("type")), _message_text(turn)
            yield _Piece(field, role if isinstance(role, str) else "", text, len(text))


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and not any(isinstance(item, str | dict) for item in prompt[:1])


def _num_chars(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return len(prompt) * _CHARS_PER_TOKEN if _is_ids(prompt) else sum(map(len, _texts_in(prompt)))


def _message_text(message: dict[str, Any]) -> str:
    text = ""
    for name in _CONTENT_FIELDS:
        if content := message.get(name):
            text += content if isinstance(content, str) else "".join(_part_texts(content))
    for name in _MESSAGE_FIELDS:
        if value := message.get(name):
            text += "".join(_texts_in(value))
    return text


def _part_texts(content: Any) -> Iterator[str]:
    # No recursion: a client's JSON may be nested deeper than Python's stack.
    left = [content]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list):
            left.extend(reversed(part))
        elif isinstance(part, dict):
            for name in _PART_FIELDS:
                if isinstance(text := part.get(name), str):
                    yield text
            for name in _PART_VALUES:
                if value := part.get(name):
                    yield from _texts_in(value)
            left.append(part.get("content"))


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every name and value in a JSON value, in an order that depends on the value alone."""
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


def _first_and_last(values: list[int]) -> tuple[int, ...]:
    if len(values) <= _MAX_HASHES:
        return tuple(values)
    return (values[0], *values[1 - _MAX_HASHES :])
