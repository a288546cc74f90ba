"""One stream for the client, although several replicas contribute to it.

A replica that continues a stream sends it from the start: first what is known, then what is new.
The text that the client already has is skipped by counting characters, which works because the
tokens are the same; a checksum verifies it. The same holds for the text of each thread in a
thread-tagged stream.
"""

import json
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from apar_core.errors import EngineError
from deployments.wire.errors import DONE_EVENT

_EVENT_END = b"\n\n"
_DATA = b"data: "
# Events are parsed only if a replica is lost or this many bytes have accumulated. Most streams end
# before that.
_UNREAD_LIMIT_BYTES = 128 * 1024

Key = tuple[int, str]
"""A choice and one of its text fields."""


class ContinuationError(EngineError):
    """A stream cannot continue: the texts of two replicas differ."""


@dataclass(slots=True)
class _Text:
    """Characters of one text field of a choice, and their checksum."""

    num_chars: int = 0
    checksum: int = 0

    def add(self, text: str) -> None:
        self.num_chars += len(text)
        self.checksum = zlib.crc32(text.encode("utf-8", "surrogatepass"), self.checksum)


@dataclass(slots=True)
class _Thread:
    """What the updates of one thread have reported, besides its text."""

    num_tokens: int = 0
    state: str = ""
    edits: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class _Sent:
    """What the client has received of the stream, besides its text."""

    identity: dict[str, Any] = field(default_factory=dict)
    role: bool = False
    finished: set[int] = field(default_factory=set)
    usage: bool = False
    done: bool = False
    threads: dict[Key, _Thread] = field(default_factory=dict)
    time_ms: int = 0


class ClientStream:
    """The stream of server-sent events that the client receives."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._held = b""
        self._unread: list[bytes] = []
        self._num_unread = 0
        self._is_first = True
        self._sent = _Sent()
        self._texts: dict[Key, _Text] = {}
        # The same fields as sent by the current replica.
        self._seen: dict[Key, _Text] = {}
        self._seen_tokens: dict[Key, int] = {}

    @property
    def complete(self) -> bool:
        """Whether the client has received the end of the stream."""
        self._read()
        return self._sent.done

    def begin_again(self) -> None:
        """Expect the stream of another replica, from the start."""
        self._read()
        self._held = b""
        self._is_first = False
        self._seen = {}
        self._seen_tokens = {}

    def forward(self, body: bytes) -> bytes:
        """Return the whole events of a piece that are new to the client.

        Raises ContinuationError if the replica's text differs from the client's.
        """
        if self._held:
            body = self._held + body
            self._held = b""
        if not body.endswith(_EVENT_END):
            body, end, self._held = body.rpartition(_EVENT_END)
            body += end
        if not self._is_first:
            return b"".join(self._new_part(event) for event in _events(body))
        self._unread.append(body)
        self._num_unread += len(body)
        if self._num_unread > _UNREAD_LIMIT_BYTES:
            self._read()
        return body

    def flush(self) -> bytes:
        """Return what was held back, for an answer that ends inside an event or has none."""
        held, self._held = self._held, b""
        return held if self._is_first else b""

    def _read(self) -> None:
        """Parse the events that were forwarded unparsed."""
        body = b"".join(self._unread)
        self._unread.clear()
        self._num_unread = 0
        for event in _events(body):
            if event == DONE_EVENT:
                self._sent.done = True
            elif (chunk := _chunk(event)) is not None:
                self._note(chunk)

    def _note(self, chunk: dict[str, Any]) -> None:
        sent = self._sent
        for name in ("id", "created", "model"):
            if name in chunk:
                sent.identity.setdefault(name, chunk[name])
        choices = chunk.get("choices") or []
        sent.usage |= not choices and "usage" in chunk
        for choice in choices:
            sent.role |= "role" in (choice.get("delta") or {})
            if choice.get("finish_reason") is not None:
                sent.finished.add(choice.get("index", 0))
            for key, holder in _text_fields(choice):
                self._texts.setdefault(key, _Text()).add(holder[key[1]])
        apar = chunk.get("apar") or {}
        sent.time_ms = apar.get("time_ms", sent.time_ms)
        for update in apar.get("updates") or ():
            self._note_update(update)

    def _note_update(self, update: dict[str, Any]) -> None:
        key = _thread_key(update)
        self._texts.setdefault(key, _Text()).add(update["text"])
        thread = self._sent.threads.setdefault(key, _Thread())
        thread.num_tokens += update["tokens"]
        thread.state = update["state"]
        thread.edits |= {edit["paragraph"]: edit for edit in update.get("edits", ())}

    def _new_part(self, event: bytes) -> bytes:
        """Return the part of a later replica's event that is new to the client."""
        sent = self._sent
        if event == DONE_EVENT:
            sent.done = True
            return event
        chunk = _chunk(event)
        if chunk is None or "error" in chunk:
            return event
        choices = chunk.get("choices") or []
        updates = self._cut_updates(chunk)
        if choices and not any([self._cut(choice) for choice in choices]) and not updates:
            return b""
        if not choices and sent.usage and "usage" in chunk:
            return b""
        chunk |= sent.identity
        self._note(chunk)
        text = json.dumps(chunk, separators=(",", ":"), ensure_ascii=False)
        return _DATA + text.encode() + _EVENT_END

    def _cut(self, choice: dict[str, Any]) -> bool:
        """Remove what the client has from a choice; returns whether anything is left."""
        is_new = False
        delta = choice.get("delta")
        if delta and "role" in delta:
            is_new = not self._sent.role
            if self._sent.role:
                del delta["role"]
        for key, holder in _text_fields(choice):
            holder[key[1]] = self._cut_text(key, holder[key[1]])
            is_new |= bool(holder[key[1]])
        if choice.get("finish_reason") is not None:
            index = choice.get("index", 0)
            is_new |= index not in self._sent.finished
            self._check_whole(index)
        return is_new

    def _cut_updates(self, chunk: dict[str, Any]) -> bool:
        """Remove what the client has from the updates of threads; returns whether any are left."""
        apar = chunk.get("apar") or {}
        if "updates" not in apar:
            return False
        apar["updates"] = [update for update in apar["updates"] if self._cut_update(update)]
        # The clock of a replica starts with its own part of the stream.
        elapsed_ms = round((self._clock() - self._began_s) * 1000)
        apar["time_ms"] = max(self._sent.time_ms, elapsed_ms)
        return bool(apar["updates"])

    def _cut_update(self, update: dict[str, Any]) -> bool:
        """Remove what the client has from an update; returns whether anything is left."""
        key = _thread_key(update)
        update["text"] = self._cut_text(key, update["text"])
        before = self._seen_tokens.get(key, 0)
        after = self._seen_tokens[key] = before + update["tokens"]
        thread = self._sent.threads.get(key)
        if thread is None:
            return True
        # As in every update of a thread but its first.
        update.pop("parent", None)
        update.pop("position", None)
        update["tokens"] = max(0, after - max(before, thread.num_tokens))
        edits = [
            edit for edit in update.pop("edits", ()) if edit != thread.edits.get(edit["paragraph"])
        ]
        if edits:
            update["edits"] = edits
        # A replica that has not replayed the whole thread yet may report an earlier state.
        changed = update["state"] != thread.state and after >= thread.num_tokens
        return bool(update["text"] or update["tokens"] or edits or changed)

    def _check_whole(self, index: int) -> None:
        """Raise ContinuationError if a choice ends before the client's text of it does."""
        for key, sent in self._texts.items():
            seen = self._seen.get(key, _Text())
            if key[0] == index and seen.num_chars < sent.num_chars:
                raise ContinuationError(
                    f"{key[1]!r} ends after {seen.num_chars} of {sent.num_chars} characters"
                )

    def _cut_text(self, key: Key, text: str) -> str:
        sent = self._texts.get(key, _Text())
        seen = self._seen.setdefault(key, _Text())
        num_known = min(len(text), max(0, sent.num_chars - seen.num_chars))
        seen.add(text[:num_known])
        if num_known and seen.num_chars == sent.num_chars and seen.checksum != sent.checksum:
            raise ContinuationError(
                f"the first {sent.num_chars} characters of {key[1]!r} differ between replicas"
            )
        seen.add(text[num_known:])
        return text[num_known:]


def _events(body: bytes) -> Iterator[bytes]:
    for event in body.split(_EVENT_END):
        if event:
            yield event + _EVENT_END


def _chunk(event: bytes) -> dict[str, Any] | None:
    """Return the JSON object of an event, None for anything else."""
    if not event.startswith(_DATA):
        return None
    try:
        chunk = json.loads(event[len(_DATA) :])
    except ValueError:
        return None
    return chunk if isinstance(chunk, dict) else None


def _thread_key(update: dict[str, Any]) -> Key:
    """Return the key of a thread's text; no field of a choice has such a name."""
    return update["choice"], f"apar.{update['id']}"


def _text_fields(choice: dict[str, Any]) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Yield every text of a choice: its key and the object that holds it."""
    index = choice.get("index", 0)
    if isinstance(choice.get("text"), str):
        yield (index, "text"), choice
    delta = choice.get("delta") or {}
    for name, value in delta.items():
        if name != "role" and isinstance(value, str):
            yield (index, name), delta
