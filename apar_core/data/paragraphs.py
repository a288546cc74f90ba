"""Paragraphs whose first sentence is the root of the rest (APAR, appendix B, rule 2)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from apar_core.data.detail_spans import DetailSpan, trimmed_span
from apar_core.data.sentences import first_sentence_end

MIN_DETAILS = 2

_BLANK_LINES = re.compile(r"\n[ \t\r]*\n\s*")
_ITEM = re.compile(r"^[ \t]*(?:[*+•\-–]|\d{1,3}[.)])[ \t]", re.MULTILINE)  # noqa: RUF001


def paragraph_details(answer: str) -> list[DetailSpan] | None:
    """Return what follows the first sentence of each paragraph, or None without enough of them.

    A paragraph of one sentence is passed over, and so is one of several list items: its first
    sentence leads to no other item.
    """
    details = [
        detail
        for start, end in _paragraph_spans(answer)
        if (detail := _detail(answer, start, end)) is not None
    ]
    return details if len(details) >= MIN_DETAILS else None


def _paragraph_spans(answer: str) -> Iterator[tuple[int, int]]:
    start = 0
    for blank in _BLANK_LINES.finditer(answer):
        yield start, blank.start()
        start = blank.end()
    yield start, len(answer)


def _detail(answer: str, start: int, end: int) -> DetailSpan | None:
    paragraph = answer[start:end]
    sentence_end = first_sentence_end(paragraph)
    if sentence_end is None:
        return None
    first_item = _ITEM.match(paragraph)
    if first_item is not None and _ITEM.search(paragraph, first_item.end()) is not None:
        return None
    return trimmed_span(answer, start + sentence_end, end)
