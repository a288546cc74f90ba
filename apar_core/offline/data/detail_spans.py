"""The stretches of an answer that are details, and the tree that they make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apar_core.offline.data.records import ParagraphRecord, chain


@dataclass(frozen=True, slots=True)
class DetailSpan:
    """A detail is `answer[start:end]`; the text before it, since the last detail, is its root.

    The blank or line break behind the root opens the detail, and the line breaks before the next
    point open the next root: so each thread writes its own separators.
    """

    start: int
    end: int


def trimmed_span(answer: str, start: int, end: int) -> DetailSpan | None:
    """Return the span without the blanks at its end, or None where nothing but blanks is in it."""
    content = answer[start:end].rstrip()
    return DetailSpan(start, start + len(content)) if content else None


def tree_of_details(answer: str, details: Sequence[DetailSpan]) -> ParagraphRecord:
    """Return the answer with a fork before each detail; they come in order, apart from each other.

    Without details it is one paragraph.
    """
    if not details:
        return ParagraphRecord(answer)
    pairs: list[tuple[str, ParagraphRecord]] = []
    behind = 0
    for detail in details:
        root = answer[behind : detail.start]
        pairs.append((root, ParagraphRecord(answer[detail.start : detail.end])))
        behind = detail.end
    return chain(pairs, closing=answer[behind:])
