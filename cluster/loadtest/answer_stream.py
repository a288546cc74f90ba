"""The text of a streamed chat completion, put together event by event."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_DATA = b"data:"
_DONE = b"[DONE]"


class StreamError(Exception):
    """The server says in the midst of a stream that it failed."""


class NotAStreamError(Exception):
    """What comes is no stream of chat completions."""


@dataclass(slots=True)
class AnswerStream:
    """Takes bytes as they come; `pieces` are the (time, characters) of every piece of text.

    `paragraph_s` is when the first paragraph was complete: its text and the line break behind it.
    `last_s` is when the last part of the answer came; what follows it is usage.
    """

    pieces: list[tuple[float, int]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    characters: int = 0
    paragraph_s: float | None = None
    last_s: float | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    apar: dict[str, Any] | None = None
    done: bool = False
    _rest: bytes = b""
    _begun: bool = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Take what came at a time. Raises StreamError and NotAStreamError."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(_DATA):
                self._take(line[len(_DATA) :].strip(), now_s)

    @property
    def whole(self) -> bool:
        """Whether the answer has come to its end."""
        return self.done or self.finish_reason is not None

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == _DONE:
            self.done = True
            return
        try:
            event = json.loads(payload)
            error = event.get("error")
            if error is None:
                self._take_event(event, now_s)
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            shown = payload[:80].decode(errors="replace")
            raise NotAStreamError(f"an event is no chunk of a chat: {shown}") from problem
        if error is not None:
            message = error.get("message") if isinstance(error, dict) else error
            raise StreamError(str(message))

    def _take_event(self, event: dict[str, Any], now_s: float) -> None:
        self.usage = event.get("usage") or self.usage
        self.apar = event.get("apar") or self.apar
        for choice in event["choices"]:
            self.last_s = now_s
            delta = choice.get("delta") or {}
            # Models that think aloud send that text under names of its own.
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            if text:
                self._take_text(text, now_s)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _take_text(self, text: str, now_s: float) -> None:
        self.pieces.append((round(now_s, 5), len(text)))
        self.text.append(text)
        self.characters += len(text)
        if self.paragraph_s is not None:
            return
        shown = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(shown)
        if self._begun and "\n" in shown:
            self.paragraph_s = round(now_s, 5)
