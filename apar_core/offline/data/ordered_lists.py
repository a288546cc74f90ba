"""Numbered points with a root before a colon and a detail after it (APAR, appendix B, rule 1)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from apar_core.offline.data.detail_spans import DetailSpan, trimmed_span

MIN_POINTS = 3
MIN_CONTENT_CHARACTERS = 10

_POINT = re.compile(
    r"^(?P<indent>[ \t]{0,12})(?:#{1,6}[ \t]+)?[*_]{0,3}"
    r"(?P<number>\d{1,3})[.)][*_]{0,3}[ \t]+(?=\S)",
    re.MULTILINE,
)
# Not the colon of 10:30; the marks that close an emphasis belong to the root.
_ROOT_COLON = re.compile(r":[*_]{0,3}(?=\s|\Z)|：[*_]{0,3}")  # noqa: RUF001
_LINE_END = re.compile(r"[\r\n]|\Z")
_HEADING_START = re.compile(r"\n[ \t]*#{1,6}[ \t]")
# A paragraph that is neither indented nor an item ends the last point, and so does the bare number
# of a point at which the answer breaks off.
_LIST_END = re.compile(r"\n[ \t\r]*\n(?=[^\s*+•\-–—])|\n[ \t]*\d{1,3}[.)]\s*\Z")  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class Point:
    """A numbered line: where it begins, where its text does, and its number."""

    start: int
    text_start: int
    number: int


def ordered_list_details(answer: str) -> list[DetailSpan] | None:
    """Return the details of the answer's numbered points, or None if it is no ordered list.

    All lists of an answer count together. Deeper lists belong to the detail of their point, and
    a point without a colon stays in the thread of the roots.
    """
    details: list[DetailSpan] = []
    lists = list(_lists(answer))
    for index, points in enumerate(lists):
        following = lists[index + 1][0].start if index + 1 < len(lists) else len(answer)
        for detail in _list_details(answer, points, following):
            if _num_content_characters(answer, detail) < MIN_CONTENT_CHARACTERS:
                return None
            details.append(detail)
    return details if len(details) >= MIN_POINTS else None


def _lists(answer: str) -> Iterator[list[Point]]:
    """Yield each list of the answer's outermost level; numbers out of order are no points."""
    points: list[Point] = []
    list_indent = 0
    for match in _POINT.finditer(answer):
        indent = len(match["indent"].expandtabs(4))
        number = int(match["number"])
        if points and indent > list_indent + 1:
            continue
        previous = points[-1].number if points else None
        goes_on = previous is not None and (number == previous + 1 or number == previous == 1)
        if not goes_on and number > 1:
            continue
        if points and not goes_on:
            yield points
            points = []
        if not points:
            list_indent = indent
        points.append(Point(match.start(), match.end(), number))
    if points:
        yield points


def _list_details(answer: str, points: Sequence[Point], following: int) -> Iterator[DetailSpan]:
    for index, point in enumerate(points):
        is_last = index + 1 == len(points)
        end = following if is_last else points[index + 1].start
        line_end = _LINE_END.search(answer, point.text_start)
        # \Z is the end of the searched line, so a colon there is found too.
        colon = _ROOT_COLON.search(answer, point.text_start, line_end.start() if line_end else end)
        if colon is None:
            continue
        start = colon.end()
        end = _detail_end(answer, start, end, is_last=is_last)
        yield trimmed_span(answer, start, end) or DetailSpan(start, start)


def _detail_end(answer: str, start: int, end: int, *, is_last: bool) -> int:
    """Return where the detail gives way to a heading or, after the last point, a paragraph."""
    content = start + len(answer[start:end]) - len(answer[start:end].lstrip())
    for pattern in (_HEADING_START, _LIST_END) if is_last else (_HEADING_START,):
        match = pattern.search(answer, content, end)
        if match is not None:
            end = match.start()
    return end


def _num_content_characters(answer: str, detail: DetailSpan) -> int:
    return len(answer[detail.start : detail.end].strip())
