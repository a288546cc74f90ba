"""Recorded requests as trees: JSON lines with `prompt`, `response` and, if any, `history`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apar_core.offline.data.records import ParagraphRecord, thread_paragraphs
from apar_core.offline.data.structure import extract_tree
from apar_core.tree import ROOT_THREAD, ParagraphTree, ThreadId, child_thread
from cluster.sizing.errors import SizingError
from cluster.sizing.request_shape import Answer

CHARACTERS_PER_TOKEN = 4.2
"""Of English text in Llama's vocabulary."""
TEMPLATE_TOKENS = 40
"""Of Vicuna's system prompt and roles."""


def read_trace(path: Path, *, forking: bool = True) -> Iterator[Answer]:
    """Each recorded request with the tree that the paper's rules make of its answer.

    Without `forking` every answer is one thread. Raises SizingError for a file or a line that
    cannot be used.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _answer(line, f"{path}, line {number}", forking=forking)
    except (OSError, UnicodeDecodeError) as error:
        raise SizingError(f"{path} cannot be read: {error}") from error


def _answer(line: str, place: str, *, forking: bool) -> Answer:
    try:
        record: Any = json.loads(line)
        texts = [record["prompt"], *(turn["content"] for turn in record.get("history") or ())]
        response = record["response"]
        if not isinstance(response, str):
            raise TypeError("`response` is no text")
        prompt_tokens = TEMPLATE_TOKENS + sum(num_tokens(text) for text in texts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SizingError(f"{place}: no `prompt` and `response`: {error}") from error
    record_tree = extract_tree(response).tree if forking else ParagraphRecord(response)
    return prompt_tokens, tree_of(record_tree)


def num_tokens(text: str) -> int:
    """About how many tokens a text has."""
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


def tree_of(answer: ParagraphRecord) -> ParagraphTree[int]:
    """The answer's finished tree with as many items as it has tokens."""
    tree: ParagraphTree[int] = ParagraphTree()
    _add_thread(tree, ROOT_THREAD, answer)
    return tree


def _add_thread(tree: ParagraphTree[int], thread: ThreadId, first: ParagraphRecord) -> None:
    details: list[tuple[ThreadId, ParagraphRecord]] = []
    for paragraph in thread_paragraphs(first):
        tree.append(thread, range(num_tokens(paragraph.text)))
        if paragraph.first_child is not None:
            child = child_thread(thread, len(details))
            tree.fork(thread, child)
            details.append((child, paragraph.first_child))
    tree.finish(thread)
    for child, detail in details:
        _add_thread(tree, child, detail)
