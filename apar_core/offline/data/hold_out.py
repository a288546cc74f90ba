"""Queries that are kept out of training, to measure a model on what it has not learned.

A held-out query is the first question of a conversation, with the answer that was recorded. Nothing
else of its conversation is trained on, and no example in which a user says the same.
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

# Published copies of ShareGPT divide the long conversation QWJhYvA into QWJhYvA_0, QWJhYvA_8 and so
# on. The words of numbered ids, as in alpaca_12 or Example_3, are no conversation.
_SHAREGPT_PART = re.compile(r"((?![A-Z]?[a-z]+_|[A-Z]+_)[A-Za-z0-9]{7})_\d+")


def conversation_of(item: Any, place: str) -> str:
    """Return what all parts of a conversation share: the item's id, or its place without one."""
    item_id = item.get("id") if isinstance(item, dict) else None
    if not isinstance(item_id, str) or not item_id:
        return place
    part = _SHAREGPT_PART.fullmatch(item_id)
    return f"id {item_id if part is None else part[1]}"


def query_sums(messages: Sequence[ChatMessage]) -> frozenset[bytes]:
    """Return a short sum of each user's text; blanks and line breaks do not count."""
    return frozenset(
        hashlib.blake2b(" ".join(message.content.split()).encode(), digest_size=16).digest()
        for message in messages
        if message.role == "user"
    )


@dataclass(frozen=True, slots=True)
class SpooledExample:
    """Where the line of an example is, and what it must not share with a held-out query."""

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
        self._entries: list[SpooledExample] = []
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
        entry = SpooledExample(
            self._num_bytes, len(line), is_structured, conversation, queries, opens
        )
        self._entries.append(entry)
        self._spool.write(line)
        self._num_bytes += len(line)

    def draw(self, path: Path) -> tuple[int, list[SpooledExample]]:
        """Write the held-out queries; return their number and the examples left for training."""
        candidates = [entry for entry in self._entries if entry.opens]
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
    """Return a recorded request: questions for evaluation, and answers for replay."""
    line = {
        "id": example.example_id,
        "category": example.kind,
        "prompt": example.messages[-1].content,
        "response": flat_text(example.answer),
        "history": [message.as_dict() for message in example.messages[:-1]],
    }
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"
