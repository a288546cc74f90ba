"""Recorded answers as fork trees: how many tokens each thread generates, and where it forks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from apar_core.offline.data.records import ParagraphRecord, thread_paragraphs
from apar_core.offline.data.structure import extract_tree

CHARACTERS_PER_TOKEN = 4.2
"""Of English text in Llama's vocabulary; ../shared/data/SOURCES.md reckons with it too."""


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """What one thread generates: `num_tokens` with its fork tokens and its end token.

    `forks` holds (tokens generated with the fork token, index of the child), in order.
    """

    num_tokens: int
    forks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerTree:
    """The threads of one answer, the root first, parents before their children.

    `text_tokens` are what the client gets: no fork and no end token.
    """

    threads: tuple[ThreadPlan, ...]
    text_tokens: int
    category: str = ""
    generated_tokens: int = field(init=False, default=0)
    """Tokens of all threads, fork and end tokens included."""

    def __post_init__(self) -> None:
        total = sum(thread.num_tokens for thread in self.threads)
        object.__setattr__(self, "generated_tokens", total)

    @property
    def critical_steps(self) -> int:
        """Steps until the last thread ends when none ever waits (APAR, algorithm 1)."""
        return max(end for _, end in self.spans())

    def spans(self) -> list[tuple[int, int]]:
        """(first, last + 1) step of every thread when none ever waits, counted from 0."""
        starts = [0] * len(self.threads)
        for index, thread in enumerate(self.threads):
            for generated, child in thread.forks:
                starts[child] = starts[index] + generated
        return [
            (start, start + thread.num_tokens)
            for start, thread in zip(starts, self.threads, strict=True)
        ]

    def without_forks(self) -> AnswerTree:
        """Return the same text as one thread."""
        return AnswerTree((ThreadPlan(self.text_tokens + 1),), self.text_tokens, self.category)


def answer_tree(answer: ParagraphRecord, category: str = "") -> AnswerTree:
    """Count the tokens of a parsed answer."""
    threads: list[ThreadPlan] = []
    text_tokens = _add_thread(threads, answer)
    return AnswerTree(tuple(threads), text_tokens, category)


def _add_thread(threads: list[ThreadPlan], first: ParagraphRecord) -> int:
    index = len(threads)
    threads.append(ThreadPlan(0))
    generated = text_tokens = 0
    forks: list[tuple[int, int]] = []
    for paragraph in thread_paragraphs(first):
        num_tokens = math.ceil(len(paragraph.text) / CHARACTERS_PER_TOKEN)
        generated += num_tokens
        text_tokens += num_tokens
        if paragraph.first_child is not None:
            generated += 1
            forks.append((generated, len(threads)))
            text_tokens += _add_thread(threads, paragraph.first_child)
    threads[index] = ThreadPlan(generated + 1, tuple(forks))
    return text_tokens


def read_trees(paths: Sequence[Path]) -> list[AnswerTree]:
    """Read the answers of JSON lines with `response` and `category`.

    Raises FileNotFoundError that names a missing file.
    """
    trees: list[AnswerTree] = []
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"no recorded answers at {path}: the simulation takes its fork trees from there"
            )
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                answer = extract_tree(record["response"]).tree
                trees.append(answer_tree(answer, str(record.get("category", ""))))
    return trees
