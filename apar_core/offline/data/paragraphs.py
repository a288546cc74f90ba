"""Paragraphs whose first sentence is the root of the rest (APAR, appendix B, rule 2)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from apar_core.offline.data.detail_spans import DetailSpan, trimmed_span
from apar_core.offline.data.sentences import first_sentence_end

MIN_PARAGRAPHS = 2

_BLANK_LINES = re.compile(r"\n[ \t\r]*\n\s*")
_ITEM = re.compile(r"^(?P<indent>[ \t]*)(?:[*+•\-–]|\d{1,3}[.)])[ \t]", re.MULTILINE)  # noqa: RUF001

# An opening that promises the answer and says nothing of it: no thread could go on from it alone.
_INTERJECTION = re.compile(
    r"\W*(?:(?:sure|certainly|absolutely|definitely|of course|okay|ok|yes|no|great|great question|"
    r"hello|hi|hey|aloha|thank you|thanks|you're welcome)[!.]|"
    r"(?:好的|当然|もちろん|はい)[！。])\W*\Z",  # noqa: RUF001
    re.IGNORECASE,
)


def paragraph_details(answer: str) -> list[DetailSpan] | None:
    """Return what follows the first sentence of each paragraph, or None without enough of them.

    A paragraph of one sentence is passed over. Lines that lead to a list below them are a root
    whatever they end with, and "Sure!" is none without the sentence after it.
    """
    spans = list(_paragraph_spans(answer))
    if len(spans) < MIN_PARAGRAPHS:
        return None
    details = [
        detail for start, end in spans if (detail := _detail(answer, start, end)) is not None
    ]
    return details or None


def _paragraph_spans(answer: str) -> Iterator[tuple[int, int]]:
    start = 0
    for blank in _BLANK_LINES.finditer(answer):
        if blank.start() > start:
            yield start, blank.start()
        start = blank.end()
    if answer[start:].strip():
        yield start, len(answer)


def _detail(answer: str, start: int, end: int) -> DetailSpan | None:
    paragraph = answer[start:end]
    root_end = _root_end(paragraph)
    lead_end = _lead_end(paragraph)
    if lead_end is not None and (root_end is None or lead_end < root_end):
        root_end = lead_end
    return None if root_end is None else trimmed_span(answer, start + root_end, end)


def _root_end(paragraph: str) -> int | None:
    end = first_sentence_end(paragraph)
    if end is None or _INTERJECTION.match(paragraph, 0, end) is None:
        return end
    second = first_sentence_end(paragraph[end:])
    return None if second is None else end + second


def _lead_end(paragraph: str) -> int | None:
    """Return where the lines end that lead to a list below them, if the paragraph is such."""
    first = _ITEM.match(paragraph)
    item = _ITEM.search(paragraph, first.end() if first is not None else 0)
    if item is None or (first is not None and _level(item) <= _level(first) + 1):
        return None
    return len(paragraph[: item.start()].rstrip()) or None


def _level(item: re.Match[str]) -> int:
    return len(item["indent"].expandtabs(4))
