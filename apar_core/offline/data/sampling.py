"""Sampling of prepared examples: uniform samples of a stream, and queries held out of training.

A held-out query is the first question of a conversation together with its recorded answer. As in
the paper's APAR test set, the answer forks, unless the natural mix is held out. The rest of its
conversation is left out of training, and so is every example with the same user message.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from apar_core.offline.data.example_file import example_of_line
from apar_core.offline.data.records import ChatMessage, ExampleRecord, flat_text

HELD_OUT_FILE = "held_out.jsonl"

# Published copies of ShareGPT split the long conversation QWJhYvA into QWJhYvA_0, QWJhYvA_8 and so
# on. Prefixes that are words, as in alpaca_12 or Example_3, are not conversation ids.
_SHAREGPT_PART = re.compile(r"((?![A-Z]?[a-z]+_|[A-Z]+_)[A-Za-z0-9]{7})_\d+")


class LineReservoir:
    """Uniform random sample of `capacity` lines of a stream; all lines if None.

    Sampled lines are spooled to a file, so memory holds only their offsets. The sample depends only
    on the seed and the order of the lines. Source: Vitter's algorithm R.
    """

    def __init__(self, spool: IO[bytes], capacity: int | None, seed: str) -> None:
        self._spool = spool
        self._capacity = capacity
        self._random = random.Random(seed)
        self._places: list[tuple[int, int]] = []
        self._num_spooled_bytes = 0
        self.num_seen = 0

    def __len__(self) -> int:
        return len(self._places)

    def offer(self, line: bytes) -> None:
        """Sample the line or drop it."""
        self.num_seen += 1
        if self._capacity is None or len(self._places) < self._capacity:
            self._places.append(self._store(line))
            return
        index = self._random.randrange(self.num_seen)
        if index < self._capacity:
            self._places[index] = self._store(line)

    def write(self, path: Path) -> None:
        """Write the sample in stream order."""
        self._spool.flush()
        with path.open("wb") as file:
            for start, length in sorted(self._places):
                self._spool.seek(start)
                file.write(self._spool.read(length))

    def _store(self, line: bytes) -> tuple[int, int]:
        start = self._num_spooled_bytes
        self._spool.write(line)
        self._num_spooled_bytes += len(line)
        return start, len(line)


def conversation_of(item: Any, place: str) -> str:
    """Return an identifier shared by all parts of a conversation: the item's id, else its place."""
    item_id = item.get("id") if isinstance(item, dict) else None
    if not isinstance(item_id, str) or not item_id:
        return place
    part = _SHAREGPT_PART.fullmatch(item_id)
    return f"id {item_id if part is None else part[1]}"


def query_sums(messages: Sequence[ChatMessage]) -> frozenset[bytes]:
    """Return a digest of each user message; differences in whitespace are ignored."""
    return frozenset(
        hashlib.blake2b(" ".join(message.content.split()).encode(), digest_size=16).digest()
        for message in messages
        if message.role == "user"
    )


@dataclass(frozen=True, slots=True)
class SpooledExample:
    """Offset and length of an example's line, and what it must not share with held-out queries.

    `opens` tells whether the example has a single question, the first of its conversation.
    """

    start: int
    length: int
    is_structured: bool
    conversation: str
    queries: frozenset[bytes]
    opens: bool


class HoldOut:
    """Spools all examples to a file until the held-out queries can be drawn from the whole set.

    The draw depends only on the seed and the order of the examples.
    """

    def __init__(self, spool: IO[bytes], wanted: int, seed: int, *, mixed: bool) -> None:
        """Hold out queries whose answers fork, or the natural mix of all."""
        self._spool = spool
        self._wanted = wanted
        self._mixed = mixed
        self._random = random.Random(f"{seed} {HELD_OUT_FILE}")
        self._entries: list[SpooledExample] = []
        self._num_bytes = 0

    @property
    def candidates(self) -> list[SpooledExample]:
        """First questions of conversations that may be held out."""
        return [
            entry for entry in self._entries if entry.opens and (self._mixed or entry.is_structured)
        ]

    def add(
        self,
        line: bytes,
        *,
        is_structured: bool,
        conversation: str,
        queries: frozenset[bytes],
        opens: bool,
    ) -> None:
        """Spool the line of an example; the arguments are as in `SpooledExample`."""
        entry = SpooledExample(
            self._num_bytes, len(line), is_structured, conversation, queries, opens
        )
        self._entries.append(entry)
        self._spool.write(line)
        self._num_bytes += len(line)

    def draw(self, path: Path) -> tuple[int, list[SpooledExample]]:
        """Write the held-out queries; return their number and the examples left for training."""
        candidates = self.candidates
        self._random.shuffle(candidates)
        conversations: set[str] = set()
        queries: set[bytes] = set()
        examples: dict[str | None, ExampleRecord] = {}
        for entry in candidates:
            if len(examples) == self._wanted:
                break
            example = example_of_line(self.line(entry))
            known = entry.conversation in conversations or not queries.isdisjoint(entry.queries)
            if not known and example.example_id not in examples:
                conversations.add(entry.conversation)
                queries |= entry.queries
                examples[example.example_id] = example
        with path.open("wb") as file:
            for example in examples.values():
                file.write(_trace_line(example))
        return len(examples), [
            entry
            for entry in self._entries
            if entry.conversation not in conversations and queries.isdisjoint(entry.queries)
        ]

    def line(self, entry: SpooledExample) -> bytes:
        """Return the line of an example."""
        self._spool.seek(entry.start)
        return self._spool.read(entry.length)


def _trace_line(example: ExampleRecord) -> bytes:
    """Return the example as a trace line, which evaluations read as a question and replay."""
    line = {
        "id": example.example_id,
        "category": example.kind,
        "prompt": example.messages[-1].content,
        "response": flat_text(example.answer),
        "history": [message.as_dict() for message in example.messages[:-1]],
    }
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"
