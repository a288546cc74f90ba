"""Queries that are kept out of training, to measure a model on what it has not learned.

A held-out query is the first question of a conversation, with the answer that was recorded. Nothing
else of its conversation is trained on, and no example in which a user says the same.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from apar_core.data.example_file import example_of_line
from apar_core.data.records import ChatMessage, ExampleRecord, flat_text

HELD_OUT_FILE = "held_out.jsonl"

# Published copies of ShareGPT divide long conversations into items ID_0, ID_1 and so on.
_PART_NUMBER = re.compile(r"_\d+\Z")


def conversation_of(item: Any, place: str) -> str:
    """Return what all parts of a conversation share: the item's id, or its place without one."""
    item_id = item.get("id") if isinstance(item, dict) else None
    return f"id {_PART_NUMBER.sub('', item_id)}" if isinstance(item_id, str) and item_id else place


def query_sums(messages: Sequence[ChatMessage]) -> frozenset[bytes]:
    """Return a short sum of each user's text; blanks and line breaks do not count."""
    return frozenset(
        hashlib.blake2b(" ".join(message.content.split()).encode(), digest_size=16).digest()
        for message in messages
        if message.role == "user"
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """An example of the spool: where its line is, and what it must not share."""

    start: int
    length: int
    is_structured: bool
    conversation: str
    queries: frozenset[bytes]
    opens: bool


class HoldOut:
    """Keeps all examples in a file until the held-out queries can be drawn from the whole.

    The draw depends on the seed and the order of the examples alone.
    """

    def __init__(self, spool: IO[bytes], wanted: int, seed: int) -> None:
        self._spool = spool
        self._wanted = wanted
        self._random = random.Random(f"{seed} {HELD_OUT_FILE}")
        self._entries: list[_Entry] = []
        self._num_bytes = 0

    @property
    def num_candidates(self) -> int:
        """First questions of conversations."""
        return sum(entry.opens for entry in self._entries)

    def add(
        self,
        line: bytes,
        *,
        is_structured: bool,
        conversation: str,
        queries: frozenset[bytes],
        opens: bool,
    ) -> None:
        """Keep the line of an example; `opens` tells whether it has one question, the first."""
        entry = _Entry(self._num_bytes, len(line), is_structured, conversation, queries, opens)
        self._entries.append(entry)
        self._spool.write(line)
        self._num_bytes += len(line)

    def draw(self, path: Path) -> tuple[int, list[tuple[bool, int, int]]]:
        """Write the held-out queries; return their number and the examples left for training.

        Each of the latter is `(is_structured, start, length)`, for `lines`.
        """
        candidates = [entry for entry in self._entries if entry.opens]
        self._random.shuffle(candidates)
        conversations: set[str] = set()
        queries: set[bytes] = set()
        examples: dict[str | None, ExampleRecord] = {}
        for entry in candidates:
            if len(examples) == self._wanted:
                break
            example = example_of_line(self._line(entry.start, entry.length))
            known = entry.conversation in conversations or not queries.isdisjoint(entry.queries)
            if not known and example.example_id not in examples:
                conversations.add(entry.conversation)
                queries |= entry.queries
                examples[example.example_id] = example
        with path.open("wb") as file:
            for example in examples.values():
                file.write(_trace_line(example))
        return len(examples), [
            (entry.is_structured, entry.start, entry.length)
            for entry in self._entries
            if entry.conversation not in conversations and queries.isdisjoint(entry.queries)
        ]

    def lines(self, places: Sequence[tuple[bool, int, int]]) -> Iterator[tuple[bool, bytes]]:
        """Yield `(is_structured, line)` of examples."""
        for is_structured, start, length in places:
            yield is_structured, self._line(start, length)

    def _line(self, start: int, length: int) -> bytes:
        self._spool.seek(start)
        return self._spool.read(length)


def _trace_line(example: ExampleRecord) -> bytes:
    """Return a recorded request: questions for evaluation, and answers for replay."""
    line = {
        "id": example.example_id,
        "category": example.kind,
        "prompt": example.messages[-1].content,
        "response": flat_text(example.answer),
        "history": [message.as_dict() for message in example.messages[:-1]],
    }
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"
