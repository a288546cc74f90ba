"""Reads off a request's body what its router needs, before anything is tokenised."""

from collections.abc import Iterator
from typing import Any

from deployments.gateway.body import MESSAGE_FIELDS, PART_FIELDS, texts_in
from deployments.wire.request import RequestHint

_CHARACTERS_PER_TOKEN = 4
# A chat template's own tokens around each message.
_TOKENS_PER_MESSAGE = 4
# A long piece is cut here too: requests may share its beginning, a document say, and no more.
_CUTS = (1024, 4096, 16384, 65536)
# Of more pieces than this, the first and the last ones are kept.
_MAX_PIECES = 16
_MAX_CHOICES = 128
_MAX_TOKENS = 2**31
_MAX_HASHED_IDS = 4096
# With these an answer is one sequence of tokens.
_ONE_SEQUENCE = ("structured_outputs", "ignore_eos", "min_tokens")


def request_hint(fields: dict[str, Any], cache_salt: str | None = None) -> RequestHint:
    """The hint of a chat completion or completion; never raises, whatever the body holds.

    Prompts under different salts share no cache, and so no hash.
    """
    prefix = hash(cache_salt)
    num_tokens = 0
    hashes: list[int] = []
    covered: list[int] = []
    for role, text, length in _pieces(fields):
        num_tokens += _TOKENS_PER_MESSAGE
        prefix = hash((prefix, role))
        begin = 0
        for cut in _CUTS:
            if cut >= length:
                break
            prefix = hash((prefix, text[begin:cut]))
            hashes.append(prefix)
            covered.append(num_tokens + cut // _CHARACTERS_PER_TOKEN)
            begin = cut
        prefix = hash((prefix, text[begin:] if begin else text))
        num_tokens += -(-length // _CHARACTERS_PER_TOKEN)
        hashes.append(prefix)
        covered.append(num_tokens)
    return RequestHint(
        prompt_tokens=num_tokens,
        max_tokens=_max_tokens(fields),
        prefix_hashes=_ends(hashes),
        may_fork=_may_fork(fields),
        prefix_tokens=_ends(covered),
        num_choices=_num_choices(fields),
    )


def _pieces(fields: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Role, content (a string or a tuple of numbers) and length in characters of each piece."""
    # Chat templates put these first.
    for name in ("tools", "documents"):
        if text := "".join(texts_in(fields.get(name))):
            yield name, text, len(text)
    messages = fields.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            role = message.get("role")
            text = _message_text(message)
            yield role if isinstance(role, str) else "", text, len(text)
    # Which of the two is read depends on the route; hardly anyone gives both.
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # The others of a batch are other prompts, counted as choices.
    if isinstance(prompt, str):
        yield "", prompt, len(prompt)
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        ids = [item for item in prompt[:_MAX_HASHED_IDS] if isinstance(item, int)]
        yield "", repr(hash(tuple(ids))), len(prompt) * _CHARACTERS_PER_TOKEN


def _message_text(message: dict[str, Any]) -> str:
    text = _text(message.get("content"))
    for name in MESSAGE_FIELDS:
        if value := message.get(name):
            text += "".join(texts_in(value))
    return text


def _text(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (
        part if isinstance(part, str) else part.get(name)
        for part in content
        if isinstance(part, str | dict)
        for name in (("",) if isinstance(part, str) else PART_FIELDS)
    )
    return "".join(text for text in texts if isinstance(text, str))


def _max_tokens(fields: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if isinstance(value, int) and 0 < value < _MAX_TOKENS:
            return value
    return None


def _may_fork(fields: dict[str, Any]) -> bool:
    """Whether the engine would let the request fork; see `ForkInputProcessor`."""
    options = fields.get("apar")
    if isinstance(options, dict) and (
        options.get("enabled") is False or options.get("max_threads") == 1
    ):
        return False
    form = fields.get("response_format")
    if isinstance(form, dict) and form.get("type") != "text":
        return False
    if fields.get("tools") and fields.get("tool_choice") != "none":
        return False
    return not any(fields.get(name) for name in _ONE_SEQUENCE)


def _num_choices(fields: dict[str, Any]) -> int:
    choices, prompt = fields.get("n"), fields.get("prompt")
    count = choices if isinstance(choices, int) and choices > 0 else 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        count *= len(prompt)
    return min(count, _MAX_CHOICES)


def _ends(values: list[int]) -> tuple[int, ...]:
    if len(values) <= _MAX_PIECES:
        return tuple(values)
    return (values[0], *values[1 - _MAX_PIECES :])
