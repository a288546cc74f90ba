"""One stream for the client, to which several replicas contribute.

A replica that continues a stream sends it from the start: first what is known, then what is new.
The text that the client already has is skipped by counting characters, which works because the
tokens are the same; a checksum verifies it. The same holds for the text of each thread in a
thread-tagged stream.

`ClientStream` is a stream of OpenAI's chunks, `NamedStream` one of named events: of the Responses
API, or of Anthropic's Messages API.
"""

import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from apar_core.errors import EngineError
from deployments.wire.errors import DONE_EVENT, ErrorResponse, named_event
from deployments.wire.routes import ResponseForm

_EVENT_END = b"\n\n"
_DATA = b"data: "
_NAME = b"event: "
_THREAD = "apar."
# Texts in the delta of one of Anthropic's content blocks.
_BLOCK_TEXTS = ("text", "thinking", "partial_json")
# Events are parsed only if a replica is lost or this many bytes have accumulated. Most streams end
# before that.
_UNREAD_LIMIT_BYTES = 128 * 1024

Key = tuple[int, str]
"""A choice, or an item of the output, and one of its text fields."""


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
    """State of one thread that its updates have reported, besides its text."""

    num_tokens: int = 0
    state: str = ""
    edits: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class _Sent:
    """State of the stream that the client has received, besides its text."""

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

    def ends_with(self, events: bytes) -> bool:
        """Return whether these events end the stream."""
        return events.endswith(DONE_EVENT)

    @property
    def may_end(self) -> bool:
        """Whether a replica may end its stream here."""
        return True

    def failure(self, error: ErrorResponse) -> bytes:
        """Return the events that end the stream with an error."""
        return error.events()

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
                self._note_updates(chunk)

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

    def _note_updates(self, chunk: dict[str, Any]) -> None:
        sent = self._sent
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
        self._note_updates(chunk)
        text = json.dumps(chunk, separators=(",", ":"), ensure_ascii=False)
        return _DATA + text.encode() + _EVENT_END

    def _cut(self, choice: dict[str, Any]) -> bool:
        """Remove what the client has from a choice; return whether anything is left."""
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
            self._check_whole(key for key in self._texts if key[0] == index)
        return is_new

    def _cut_updates(self, chunk: dict[str, Any]) -> bool:
        """Remove what the client has from the updates of threads; return whether any are left."""
        apar = chunk.get("apar") or {}
        if "updates" not in apar:
            return False
        apar["updates"] = [update for update in apar["updates"] if self._cut_update(update)]
        # The clock of a replica starts with its own part of the stream.
        elapsed_ms = round((self._clock() - self._began_s) * 1000)
        apar["time_ms"] = max(self._sent.time_ms, elapsed_ms)
        return bool(apar["updates"])

    def _cut_update(self, update: dict[str, Any]) -> bool:
        """Remove what the client has from an update; return whether anything is left."""
        key = _thread_key(update)
        update["text"] = self._cut_text(key, update["text"])
        before = self._seen_tokens.get(key, 0)
        after = self._seen_tokens[key] = before + update["tokens"]
        thread = self._sent.threads.get(key)
        if thread is None:
            return True
        # Only a thread's first update has these.
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

    def _check_whole(self, keys: Iterable[Key]) -> None:
        """Raise ContinuationError if one of these texts ends before the client's does."""
        for key in keys:
            sent, seen = self._texts[key], self._seen.get(key, _Text())
            if seen.num_chars < sent.num_chars:
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


class NamedStream(ClientStream):
    """A stream of named events.

    Deltas have text, which is cut. Every other event comes once for each item and part, and a later
    replica's ids are replaced by those that the client knows.
    """

    def __init__(
        self, form: ResponseForm, last: tuple[str, ...], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`last` are the types of the events that end a stream."""
        super().__init__(clock)
        self._form = form
        self._last = last
        self._last_starts = tuple(_NAME + name.encode() + b"\n" for name in last)
        self._has_ended = False
        self._once: set[tuple[Any, ...]] = set()
        # Of the Responses API: the response at its start, and the ids of its items.
        self._response: dict[str, Any] | None = None
        self._item_ids: dict[int, str] = {}
        self._num_events = 0

    def ends_with(self, events: bytes) -> bool:
        """Return whether the stream ends with these events."""
        begin = events.rfind(_EVENT_END, 0, -len(_EVENT_END))
        begin = 0 if begin < 0 else begin + len(_EVENT_END)
        is_end = events.startswith(self._last_starts, begin)
        self._has_ended |= is_end
        return is_end

    @property
    def may_end(self) -> bool:
        """Whether a replica may end its stream here."""
        return self._has_ended or self.complete

    def failure(self, error: ErrorResponse) -> bytes:
        """Return the events that end the stream with an error."""
        self._read()
        if self._form is not ResponseForm.RESPONSES:
            return error.events()
        events = error.events(b'"sequence_number":%d' % (self._num_events - 1))
        if self._response is None:
            return events
        reason = {"code": "server_error", "message": error.message}
        failed = {
            "type": "response.failed",
            "sequence_number": self._num_events + 1,
            "response": self._response | {"status": "failed", "error": reason},
        }
        return events + named_event(failed)

    def _note(self, chunk: dict[str, Any]) -> None:
        kind, index = chunk.get("type"), _item_of(chunk)
        self._sent.done |= kind in self._last
        self._num_events = chunk.get("sequence_number", self._num_events) + 1
        response, item = chunk.get("response"), chunk.get("item")
        if isinstance(response, dict) and self._response is None:
            self._response = response
        if isinstance(item, dict) and "id" in item:
            self._item_ids.setdefault(index, item["id"])
        text = _delta_of(chunk)
        if text is None:
            self._once.add(_place_of(chunk))
        else:
            key, holder, name = text
            self._texts.setdefault(key, _Text()).add(holder[name])

    def _new_part(self, event: bytes) -> bytes:
        chunk = _chunk(event)
        if chunk is None or chunk.get("type") == "error":
            return event
        is_new = self._cut_updates(chunk)
        if (text := _delta_of(chunk)) is not None:
            key, holder, name = text
            holder[name] = self._cut_text(key, holder[name])
            is_new |= bool(holder[name])
        elif _place_of(chunk) not in self._once:
            is_new = True
            self._check_ended(chunk)
        else:
            is_new = False  # Only deltas and the last event carry updates of threads.
        if not is_new:
            return b""
        self._rename(chunk)
        self._note(chunk)
        self._note_updates(chunk)
        return named_event(chunk)

    def _check_ended(self, chunk: dict[str, Any]) -> None:
        """Raise ContinuationError if an item ends before the client's text of it does."""
        kind = chunk.get("type", "")
        if kind in self._last:
            self._check_whole(self._texts)
        elif kind.endswith((".done", "_stop")):
            # Threads may still report what they wrote.
            item = _item_of(chunk)
            self._check_whole(
                key for key in self._texts if key[0] == item and not key[1].startswith(_THREAD)
            )

    def _rename(self, chunk: dict[str, Any]) -> None:
        """Replace the ids and numbers in a replica's event by those that the client knows."""
        if self._form is not ResponseForm.RESPONSES:
            return
        chunk["sequence_number"] = self._num_events
        index = _item_of(chunk)
        if "item_id" in chunk:
            chunk["item_id"] = self._item_ids.get(index, chunk["item_id"])
        if isinstance(item := chunk.get("item"), dict):
            item["id"] = self._item_ids.get(index, item.get("id"))
        if isinstance(response := chunk.get("response"), dict):
            known = self._response or response
            response |= {name: known[name] for name in ("id", "created_at")}
            for number, item in enumerate(response.get("output") or ()):
                item["id"] = self._item_ids.get(number, item.get("id"))


def client_stream(form: ResponseForm) -> ClientStream:
    """Return an empty stream of the given form."""
    match form:
        case ResponseForm.CHUNKS:
            return ClientStream()
        case ResponseForm.RESPONSES:
            ends = ("completed", "incomplete", "failed")
            return NamedStream(form, (*(f"response.{end}" for end in ends), "error"))
        case ResponseForm.MESSAGES:
            return NamedStream(form, ("message_stop", "error"))


def _item_of(chunk: dict[str, Any]) -> int:
    """Return the number of the item, or of Anthropic's content block, that an event is about."""
    index = chunk.get("output_index", chunk.get("index"))
    return index if isinstance(index, int) else -1


def _place_of(chunk: dict[str, Any]) -> tuple[Any, ...]:
    """Return what identifies an event that occurs only once in a stream."""
    delta = chunk.get("delta")
    kind = delta.get("type") if isinstance(delta, dict) else None
    return chunk.get("type"), _item_of(chunk), chunk.get("content_index"), kind


def _delta_of(chunk: dict[str, Any]) -> tuple[Key, dict[str, Any], str] | None:
    """Return the key of an event's text, the object that holds it, and its name there."""
    delta = chunk.get("delta")
    if isinstance(delta, str):
        return (_item_of(chunk), f"{chunk['type']}.{chunk.get('content_index')}"), chunk, "delta"
    if isinstance(delta, dict):
        for name in _BLOCK_TEXTS:
            if isinstance(delta.get(name), str):
                return (_item_of(chunk), name), delta, name
    return None


def _events(body: bytes) -> Iterator[bytes]:
    for event in body.split(_EVENT_END):
        if event:
            yield event + _EVENT_END


def _chunk(event: bytes) -> dict[str, Any] | None:
    """Return the JSON object of an event, None for anything else."""
    if event.startswith(_NAME):
        event = event[event.find(b"\n") + 1 :]
    if not event.startswith(_DATA):
        return None
    try:
        chunk = json.loads(event[len(_DATA) :])
    except ValueError:
        return None
    return chunk if isinstance(chunk, dict) else None


def _thread_key(update: dict[str, Any]) -> Key:
    """Return the key of a thread's text; no field of a choice has such a name."""
    return update["choice"], _THREAD + update["id"]


def _text_fields(choice: dict[str, Any]) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Yield every text of a choice: its key and the object that holds it."""
    index = choice.get("index", 0)
    if isinstance(choice.get("text"), str):
        yield (index, "text"), choice
    delta = choice.get("delta") or {}
    for name, value in delta.items():
        if name != "role" and isinstance(value, str):
            yield (index, name), delta
