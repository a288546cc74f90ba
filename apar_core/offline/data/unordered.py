"""Bullet points with a root before a colon, and headings with a list below: beyond the paper."""

from __future__ import annotations

import re

from apar_core.offline.data.detail_spans import DetailSpan, trimmed_span
from apar_core.offline.data.ordered_lists import MIN_CONTENT_CHARACTERS, MIN_POINTS

_BULLET = re.compile(r"^(?P<indent>[ \t]{0,12})[*+•\-–][ \t]+(?=\S)", re.MULTILINE)  # noqa: RUF001
_LIST_HEADING = re.compile(
    r"^(?:#{1,6}[ \t]+[^\r\n]+|\*\*[^*\r\n]+\*\*:?|[A-Z][^\r\n.!?]{2,60}:)[ \t]*(?=\r?\n)",
    re.MULTILINE,
)
_LISTED = re.compile(r"\s*\n[ \t]*(?:[*+•\-–]|\d{1,3}[.)])[ \t]")  # noqa: RUF001
_COLON = re.compile(r"[^\r\n]*?(?::[*_]{0,3}(?=\s)|：[*_]{0,3})")  # noqa: RUF001
_NEXT_PARAGRAPH = re.compile(r"\n[ \t\r]*\n(?=\S)")


def unordered_details(answer: str) -> list[DetailSpan] | None:
    """Return the details of bullet points, else of headings; None where there are fewer than 3."""
    for details in (_bullet_details(answer), _heading_details(answer)):
        if len(details) >= MIN_POINTS and all(
            len(answer[detail.start : detail.end].strip()) >= MIN_CONTENT_CHARACTERS
            for detail in details
        ):
            return details
    return None


def _bullet_details(answer: str) -> list[DetailSpan]:
    bullets = list(_BULLET.finditer(answer))
    if not bullets:
        return []
    outermost = min(len(bullet["indent"].expandtabs(4)) for bullet in bullets)
    bullets = [b for b in bullets if len(b["indent"].expandtabs(4)) <= outermost + 1]
    details: list[DetailSpan] = []
    for index, bullet in enumerate(bullets):
        end = bullets[index + 1].start() if index + 1 < len(bullets) else len(answer)
        root = _COLON.match(answer, bullet.end(), end)
        if root is None:
            continue
        paragraph = _NEXT_PARAGRAPH.search(answer, root.end(), end)
        detail = trimmed_span(answer, root.end(), paragraph.start() if paragraph else end)
        if detail is not None:
            details.append(detail)
    return details


def _heading_details(answer: str) -> list[DetailSpan]:
    """A heading leads to the list right below it, up to the next paragraph or heading."""
    headings = [h for h in _LIST_HEADING.finditer(answer) if _LISTED.match(answer, h.end())]
    details: list[DetailSpan] = []
    for index, heading in enumerate(headings):
        end = headings[index + 1].start() if index + 1 < len(headings) else len(answer)
        first_item = _LISTED.match(answer, heading.end())
        behind_item = first_item.end() if first_item is not None else heading.end()
        paragraph = re.compile(r"\n[ \t\r]*\n(?=[^\s*+•\-–\d])").search(  # noqa: RUF001
            answer, behind_item, end
        )
        detail = trimmed_span(answer, heading.end(), paragraph.start() if paragraph else end)
        if detail is not None:
            details.append(detail)
    return details
