"""One log line per request: its facts, and its text only if configured."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from http import HTTPStatus
from typing import Any

from deployments.wire.errors import DONE_EVENT, NoReplicaError
from deployments.wire.response import ResponseEnd

logger = logging.getLogger(__name__)

_EVENT = b"data: "
_NAMED_EVENT = b"event: "
_PROMPTS = ("messages", "prompt", "input")


@dataclass(slots=True)
class RequestRecord:
    """The facts of one request; None for what never happened.

    `adapter` is the LoRA adapter of `model` that the request names. `fallback_of` is the model or
    adapter that could not take the request, so that `model` answered instead. `queue_s` is the wait
    in the model's queue. `sent_s` (first sent to a replica; None if no replica took it),
    `first_byte_s` and `total_s` count from the request's arrival, like `certain_s`, the time to
    certain token of a stream: the mean over its text tokens (`ReaderTimes`). `longest_silence_s` is
    the longest time between two chunks with text. `replica_s` and, within it, `engine_s` are the
    seconds at the last replica and in its engine. `generated_tokens` counts the tokens of all
    threads; if the final cost is unknown, those reported so far. `prompt_tokens` is the gateway's
    estimate if the request ended before a replica reported them. `retries` counts lost replicas.
    `replica` is the one that finished the answer. `cancelled` is set if the client left or the
    server shut down before the end. `trace_id` is the id of the request's OpenTelemetry trace.
    `batch_id` is the batch of which the request is a line.
    """

    request_id: str
    method: str
    path: str
    key: str | None = None
    model: str | None = None
    adapter: str | None = None
    fallback_of: str | None = None
    status: int | None = None
    error_code: str | None = None
    stream: bool = False
    prompt_tokens: int | None = None
    generated_tokens: int = 0
    replica: str | None = None
    threads: int | None = None
    forks: int | None = None
    queue_s: float | None = None
    sent_s: float | None = None
    first_byte_s: float | None = None
    certain_s: float | None = None
    longest_silence_s: float | None = None
    total_s: float | None = None
    replica_s: float | None = None
    engine_s: float | None = None
    retries: int = 0
    continued: int = 0
    cancelled: bool = False
    trace_id: str | None = None
    batch_id: str | None = None

    @property
    def found_no_replica(self) -> bool:
        """Whether no replica ever took the request; after a retry, one did."""
        begun = self.status == HTTPStatus.OK or self.retries > 0
        return self.error_code == NoReplicaError.code and not begun

    def take_end(self, end: ResponseEnd) -> None:
        """Record the cost of the answer."""
        self.prompt_tokens = end.prompt_tokens
        self.generated_tokens = end.generated_tokens
        self.threads = end.threads
        self.forks = end.forks
        self.replica = end.replica
        self.replica_s = end.replica_s
        self.engine_s = end.engine_s

    def write(self, content: dict[str, Any] | None = None) -> None:
        """Log the record, with the prompt and the answer if given."""
        if logger.isEnabledFor(logging.INFO):
            facts = {name: getattr(self, name) for name in _FACTS}
            logger.info("request", extra=facts | (content or {}))


_FACTS = tuple(fact.name for fact in fields(RequestRecord))


def content_of(body: dict[str, Any], answer: bytes) -> dict[str, Any]:
    """Return the prompt and the answer of a request as the log holds them."""
    prompt = next((body[name] for name in _PROMPTS if name in body), None)
    return {"prompt": prompt, "answer": _texts(answer)}


def _texts(answer: bytes) -> list[str]:
    """Return the text of each choice of a whole or streamed answer; empty for an error.

    A response of the Responses API and a message of Anthropic's have one choice.
    """
    texts: dict[int, str] = {}
    is_stream = answer.startswith((_EVENT, _NAMED_EVENT))
    events = answer.removesuffix(DONE_EVENT).split(b"\n\n") if is_stream else [answer]
    for event in events:
        data = event[event.find(_EVENT) + len(_EVENT) :] if is_stream else event
        try:
            chunk = json.loads(data)
        except ValueError:
            continue  # The last event of a stream that was cut off.
        for choice in chunk.get("choices") or ():
            part = choice.get("delta") or choice.get("message") or choice
            index = choice.get("index", 0)
            text = part.get("content") or part.get("text") or ""
            texts[index] = texts.get(index, "") + text
        for text in _texts_of_named(chunk):
            texts[0] = texts.get(0, "") + text
    return [texts[index] for index in sorted(texts)]


def _texts_of_named(chunk: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a response, of a message, or of an event of their streams."""
    kind = chunk.get("type")
    if kind == "response.output_text.delta":
        yield chunk["delta"]
    elif kind == "content_block_delta":
        yield chunk["delta"].get("text", "")
    elif chunk.get("object") == "response":
        for item in chunk.get("output", ()):
            yield from (part.get("text", "") for part in item.get("content") or ())
    elif kind == "message":
        yield from (block.get("text", "") for block in chunk.get("content", ()))
