"""Paragraph trees of answers, extracted by the paper's rules (APAR, arXiv 2401.06761, appendix B).

An ordered list forks at each point, before the text that follows the point's colon (rule 1). Other
answers fork in each paragraph, after its first sentence (rule 2). Ambiguous answers do not fork.

Choices where the paper is silent: an answer of one paragraph is unstructured, since it has nothing
to generate in parallel. All lists of an answer count together. The number of a point ("1.") is not
a sentence, nor is "Sure!". A line that introduces a list is a root. Dates, "24/7" and odds such as
1/6 are not mathematics. The thought of a reasoning model is not split into threads; it stays at the
start of the root thread.

`StructureRules` chooses rules that the paper does not have, and thresholds of the authors' code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.data.sentences import first_sentence_end

AnswerKind = Literal["ordered_list", "paragraphs", "unordered_list", "unstructured"]
KINDS: tuple[AnswerKind, ...] = ("ordered_list", "paragraphs", "unordered_list", "unstructured")

THOUGHT_OPENING = "<think>"
THOUGHT_CLOSING = "</think>"

_MIN_POINTS = 3
_MIN_CONTENT_CHARACTERS = 10


class StructureRules(BaseModel):
    """Which rules apply; by default those of the paper."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    unordered_lists: bool = Field(
        False, description="Also fork at bullet points and below headings, unlike the paper."
    )
    points_without_colon: bool = Field(
        False,
        description="Also fork at numbered points without a colon: after a dash, the first "
        "sentence, or a heading; with unordered_lists also at bullet points after a dash.",
    )
    least_paragraphs: PositiveInt = Field(
        2, description="Fewest paragraphs of an answer that forks in them; 3 in the authors' code."
    )
    least_paragraph_forks: PositiveInt = Field(
        1, description="Fewest forks of such an answer; 3 in the authors' code."
    )

    @property
    def name(self) -> str:
        """Description for reports."""
        added = [
            name.replace("_", " ") + ("" if value is True else f" {value}")
            for name, value in self
            if value != type(self).model_fields[name].default
        ]
        return ", ".join(["appendix B of the paper", *added])


class ExtractedAnswer(NamedTuple):
    """Tree of an answer, such that `flat_text(tree)` is the answer.

    `reason` says why the answer has no forks; None if it has.
    """

    kind: AnswerKind
    tree: ParagraphRecord
    reason: str | None


_PAPER_RULES = StructureRules()


def extract_tree(answer: str, rules: StructureRules = _PAPER_RULES) -> ExtractedAnswer:
    """Structure the answer as an ordered list, else as paragraphs, else as a single thread.

    A thought before the answer is kept verbatim at the start of the first paragraph.
    """
    thought, rest = split_thought(answer)
    extracted = _extract_answer(rest, rules)
    if not thought:
        return extracted
    tree = replace(extracted.tree, text=thought + extracted.tree.text)
    return extracted._replace(tree=tree)


def _extract_answer(answer: str, rules: StructureRules) -> ExtractedAnswer:
    reason = ambiguity(answer)
    if reason is not None:
        return ExtractedAnswer("unstructured", ParagraphRecord(answer), reason)
    if rules.unordered_lists:
        details = _section_details(answer, _MARKDOWN_LEVELS)
        if details is not None:
            return ExtractedAnswer("unordered_list", _tree_of_details(answer, details), None)
    details = _ordered_list_details(answer, rules)
    if details is not None:
        return ExtractedAnswer("ordered_list", _tree_of_details(answer, details), None)
    if rules.unordered_lists:
        details = _unordered_details(answer, rules)
        if details is not None:
            return ExtractedAnswer("unordered_list", _tree_of_details(answer, details), None)
    details = _paragraph_details(answer, rules)
    if details is not None:
        return ExtractedAnswer("paragraphs", _tree_of_details(answer, details), None)
    return ExtractedAnswer("unstructured", ParagraphRecord(answer), "no structure")


@dataclass(frozen=True, slots=True)
class _Detail:
    """Detail `answer[start:end]`; its root is the text since the previous detail.

    The space or line break after the root belongs to the detail, and the line breaks before the
    next point belong to the next root. So each thread writes its own separators.
    """

    start: int
    end: int


def _trimmed_detail(answer: str, start: int, end: int) -> _Detail | None:
    """Return the detail without trailing whitespace, or None if it is all whitespace."""
    content = answer[start:end].rstrip()
    return _Detail(start, start + len(content)) if content else None


def _tree_of_details(answer: str, details: Sequence[_Detail]) -> ParagraphRecord:
    """Return the answer with a fork before each detail; `details` are ordered and disjoint."""
    pairs: list[tuple[str, ParagraphRecord]] = []
    previous_end = 0
    for detail in details:
        root = answer[previous_end : detail.start]
        pairs.append((root, ParagraphRecord(answer[detail.start : detail.end])))
        previous_end = detail.end
    return chain(pairs, closing=answer[previous_end:])


_OPENED = re.compile(r"\s*<think>.*?(?:</think>\s*|\Z)", re.DOTALL)
# If the prompt opened the thought, servers return only the rest of it. The marker must end a line:
# prose that only mentions it usually continues after it.
_CLOSING_LINE = re.compile(r"</think>[ \t]*(?:[\r\n]\s*|\Z)")


class ThoughtAndAnswer(NamedTuple):
    """The two parts of a generated text; their concatenation is the text.

    `thought` includes its markers and the whitespace after it, and is empty if there is none. The
    opening marker is missing if the prompt contained it. An unfinished thought has an empty answer.
    """

    thought: str
    answer: str


def split_thought(text: str) -> ThoughtAndAnswer:
    """Split a generated text into thought and answer."""
    opened = _OPENED.match(text)
    if opened is not None:
        return ThoughtAndAnswer(text[: opened.end()], text[opened.end() :])
    closing = _CLOSING_LINE.search(text)
    if closing is not None and THOUGHT_OPENING not in text[: closing.start()]:
        return ThoughtAndAnswer(text[: closing.end()], text[closing.end() :])
    return ThoughtAndAnswer("", text)


def is_empty_thought(thought: str) -> bool:
    """Return whether there is no thought, or only whitespace between its markers."""
    inside = thought.strip().removeprefix(THOUGHT_OPENING).removesuffix(THOUGHT_CLOSING)
    return not inside.strip()


# Line breaks and full stops may have another meaning here than in prose. The first match is the
# reason that the report gives. Each pattern of this file takes time linear in the text: a repeated
# part never begins at many places of what another one has read.
_AMBIGUITIES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "code block",
        re.compile(
            r"```|~~~|^(?:    |\t)*(?:def \w+\(|class \w+[:({]|import \w+$|#include\b|#!/|"
            r"(?:public|private|static) \w+ \w+|return [^.\n]*;$|\w[^\n]*[;{]$)",
            re.MULTILINE,
        ),
    ),
    (
        "url",
        re.compile(r"https?://|\bwww\.\w|\bftp://|\[[^\[\]\n]+\]\([^()\s]+[()]", re.IGNORECASE),
    ),
    (
        "table",
        re.compile(r"^[ \t]*\|[^\n]*\|[ \t\r]*$|^[^|\n]+\|[ \t]*:?-{2,}", re.MULTILINE),
    ),
    (
        "html",
        re.compile(
            r"<!--|<!DOCTYPE|</[a-z][\w-]*[ ]*>|<[a-z][\w-]*(?:[ ]+[\w-]+=[^<>\n]{0,200})?[ ]*/?>",
            re.IGNORECASE,
        ),
    ),
    (
        "mathematics",
        re.compile(
            r"\\\(|\\\[(?![A-Z][a-z])|\\(?:frac|sqrt|sum|int|times|cdot|begin|text|left|right|alpha|beta|pi)\b|\$\$|"
            # $x$ in one line, but not "$5 and $6".
            r"\$(?![\d\s])[^$\n]{1,80}(?<!\s)\$|"
            r"[√∑∫∏≤≥≠≈∞∂∇×÷²³]|"  # noqa: RUF001
            r"[\w)][ \t]*\^[ \t]*[\w({-]|"
            r"[\w)\]%][ \t]*=[ \t]*[-+(\[{$]{0,3}[\w]|"
            r"\d[ \t]*[+*][ \t]*[\d(]|\d[ \t]+/[ \t]+[\d(]"
        ),
    ),
)


def ambiguity(answer: str) -> str | None:
    """Return what makes the answer ambiguous ("code block", "url", ...), or None."""
    for name, pattern in _AMBIGUITIES:
        if pattern.search(answer):
            return name
    return None


# Spaces within a line: also the no-break spaces of word processors, and the ideographic space.
_BLANK = r" \t\u00a0\u2007\u202f\u3000"
_POINT = re.compile(
    rf"^(?P<indent>[{_BLANK}]{{0,12}})(?P<heading>#{{1,6}}[{_BLANK}]+)?[*_]{{0,3}}"
    rf"(?P<number>\d{{1,3}})[.)][*_]{{0,3}}[{_BLANK}]+(?=\S)",
    re.MULTILINE,
)
# Not the colon of 10:30. Closing emphasis marks belong to the root.
_ROOT_COLON = re.compile(r":[*_]{0,3}(?=\s|\Z)|：[*_]{0,3}")  # noqa: RUF001
# Neither a range nor a subtraction. Without spaces only after emphasis.
_ROOT_DASH = re.compile(
    rf"(?<=[^\s\d])[{_BLANK}][-–—](?=[{_BLANK}]\S)|(?<=\d)[{_BLANK}][-–—](?=[{_BLANK}][^\s\d])|"  # noqa: RUF001
    r"(?<=[*_])[–—](?=\w)"  # noqa: RUF001
)
_ITEM_MARK = rf"(?:[*+•\-–]|\d{{1,3}}[.)])[{_BLANK}]"  # noqa: RUF001
_LISTED_LINE = re.compile(rf"\r?\n[{_BLANK}]*{_ITEM_MARK}")
_LINE_END = re.compile(r"[\r\n]|\Z")
_HEADING_STARTS = [re.compile(rf"\n[{_BLANK}]*#{{1,{level}}}[{_BLANK}]") for level in range(1, 7)]
# The last point ends at a paragraph that is neither indented nor an item, or at a bare number with
# which the answer breaks off.
_LIST_END = re.compile(
    rf"\n[{_BLANK}\r]*\n(?=[^\s*+•\-–—])|\n[{_BLANK}]*\d{{1,3}}[.)]\s*\Z"  # noqa: RUF001
)


@dataclass(frozen=True, slots=True)
class _Point:
    """Numbered line: offsets of the line and of its text, columns of its indent, and its number.

    `level` is that of a Markdown heading, 0 of another line.
    """

    start: int
    text_start: int
    indent: int
    number: int
    level: int

    @classmethod
    def of_match(cls, match: re.Match[str]) -> _Point:
        """Return the point of a match of `_POINT`."""
        indent = len(match["indent"].expandtabs(4))
        level = (match["heading"] or "").count("#")
        return cls(match.start(), match.end(), indent, int(match["number"]), level)

    def is_nested_in(self, other: _Point) -> bool:
        """Return whether the point is indented below the other."""
        return self.indent > other.indent + 1


def _ordered_list_details(answer: str, rules: StructureRules) -> list[_Detail] | None:
    """Return the details of the numbered points, or None if the answer is not an ordered list.

    Nested lists belong to the detail of their point. A point without a colon does not fork, unless
    the rules say so.
    """
    details: list[_Detail] = []
    lists = list(_lists(answer, headings=rules.points_without_colon))
    for index, points in enumerate(lists):
        following = lists[index + 1][0].start if index + 1 < len(lists) else len(answer)
        for detail in _list_details(answer, points, following, rules):
            if _num_content_characters(answer, detail) < _MIN_CONTENT_CHARACTERS:
                return None
            details.append(detail)
    return details if len(details) >= _MIN_POINTS else None


def _lists(answer: str, *, headings: bool = False) -> Iterator[list[_Point]]:
    """Yield the top-level lists, whose numbers ascend, or are all 1.

    A number other than 1 begins a list if the next point has the number after it. With `headings`,
    points below at least three numbered headings are nested in these.
    """
    numbered = [_Point.of_match(match) for match in _POINT.finditer(answer)]
    marked = [point for point in numbered if point.level]
    if headings and len(marked) >= _MIN_POINTS:
        numbered = marked
    points: list[_Point] = []
    for index, point in enumerate(numbered):
        if points and point.is_nested_in(points[0]):
            continue
        previous = points[-1].number if points else None
        continues = previous is not None and (
            point.number > previous or point.number == previous == 1
        )
        if not continues:
            if point.number != 1 and not _is_counted_on(numbered, index):
                continue
            if points:
                yield points
            points = []
        points.append(point)
    if points:
        yield points


def _is_counted_on(numbered: Sequence[_Point], index: int) -> bool:
    """Return whether the next point at the level of a point has the number after it."""
    for other in range(index + 1, len(numbered)):
        if not numbered[other].is_nested_in(numbered[index]):
            return numbered[other].number == numbered[index].number + 1
    return False


def _list_details(
    answer: str, points: Sequence[_Point], following: int, rules: StructureRules
) -> Iterator[_Detail]:
    details: list[_Detail] = []
    for index, point in enumerate(points):
        is_last = index + 1 == len(points)
        end = following if is_last else points[index + 1].start
        line_end = _line_end(answer, point.text_start)
        # The search ends with the line, so \Z also matches a colon at its end.
        colon = _ROOT_COLON.search(answer, point.text_start, line_end)
        is_heading = rules.points_without_colon and point.level > 0
        if colon is not None and not is_heading:
            start = colon.end()
            # The colon announces what follows, also after a blank line.
            content = end - len(answer[start:end].lstrip())
            end = _detail_end(answer, content, end, is_last=is_last)
            yield _trimmed_detail(answer, start, end) or _Detail(start, start)
        elif rules.points_without_colon:
            root_end: int | None = line_end
            if not is_heading:
                root_end = _root_end_without_colon(answer, point.text_start, line_end)
            if root_end == line_end:
                end = _section_end(answer, point, line_end, end, details if is_last else None)
                detail = _trimmed_section(answer, line_end, end)
            elif root_end is not None:
                end = _detail_end(answer, root_end, end, is_last=is_last)
                detail = _trimmed_detail(answer, root_end, end)
            else:
                detail = None
            if detail and _num_content_characters(answer, detail) >= _MIN_CONTENT_CHARACTERS:
                details.append(detail)
                yield detail


def _line_end(answer: str, start: int) -> int:
    found = _LINE_END.search(answer, start)
    return found.start() if found else len(answer)


def _root_end_without_colon(answer: str, start: int, line_end: int) -> int | None:
    """Return the end of a dash or of the first sentence, else of a heading; None if there is none.

    A line is a heading if it is emphasised, or if an item of a list follows.
    """
    dash = _ROOT_DASH.search(answer, start, line_end)
    sentence = first_sentence_end(answer[start:line_end])
    ends = [dash.end()] if dash is not None else []
    ends += [start + sentence] if sentence is not None else []
    if ends:
        return min(ends)
    is_heading = answer[start:line_end].rstrip().endswith(("**", "__"))
    return line_end if is_heading or _LISTED_LINE.match(answer, line_end) else None


def _detail_end(answer: str, content: int, end: int, *, is_last: bool) -> int:
    """Return where a heading or, for the last point, a paragraph ends the detail."""
    for pattern in (_HEADING_STARTS[-1], _LIST_END) if is_last else (_HEADING_STARTS[-1],):
        match = pattern.search(answer, content, end)
        if match is not None:
            end = match.start()
    return end


def _section_end(
    answer: str, point: _Point, start: int, end: int, others: Sequence[_Detail] | None
) -> int:
    """Return where the next heading of the point's level or a higher one ends its section.

    `others` are the sections before the last one, None for a point that is not the last.
    """
    heading = _HEADING_STARTS[(point.level or 6) - 1].search(answer, start, end)
    end = heading.start() if heading else end
    if others is None:
        return end
    if not others:
        return _detail_end(answer, start, end, is_last=True)
    return _last_section_end(answer, start, end, others)


def _num_content_characters(answer: str, detail: _Detail) -> int:
    return len(answer[detail.start : detail.end].strip())


_BULLET = re.compile(
    rf"^(?P<indent>[{_BLANK}]{{0,12}})[*+•\-–][{_BLANK}]+(?=\S)",  # noqa: RUF001
    re.MULTILINE,
)
# The last kind is a heading only above a list.
_HEADING = re.compile(
    rf"^(?:(?P<marks>#{{1,6}})[{_BLANK}][^\r\n]++|(?P<emphasised>\*\*[^*\r\n]+\*\*:?)|"
    rf"[A-Z][^\r\n.!?]{{2,60}}:)[{_BLANK}]*(?=\r?\n)",
    re.MULTILINE,
)
_EMPHASISED_LEVEL, _LIST_LEVEL = 7, 8
_MARKDOWN_LEVELS, _OTHER_LEVELS = range(1, 7), range(7, 9)
_CONTINUED = re.compile(r"\W*(?:chapter|verse|chorus|bridge|stanza|scene|act)\b")
# Three marks or more, alone in a line. Bounded, so that a long line takes no quadratic time.
_RULE_LINE = rf"\n[{_BLANK}]{{0,3}}(?:-{{3,80}}|\*{{3,80}}|_{{3,80}}|\* \* \*)[{_BLANK}\r]{{0,80}}"
_RULE = re.compile(rf"{_RULE_LINE}(?=\n|\Z)")
_RULE_AT_END = re.compile(rf"{_RULE_LINE}\Z")
_LISTED = re.compile(rf"\s*\n[{_BLANK}]*{_ITEM_MARK}")
_COLON = re.compile(r"[^\r\n]*?(?::[*_]{0,3}(?=\s)|：[*_]{0,3})")  # noqa: RUF001
_NEXT_PARAGRAPH = re.compile(rf"\n[{_BLANK}\r]*\n(?=\S)")
_NEXT_UNLISTED = re.compile(rf"\n[{_BLANK}\r]*\n(?=\S)(?!{_ITEM_MARK})")


def _unordered_details(answer: str, rules: StructureRules) -> list[_Detail] | None:
    """Return the details of headings, else of bullet points; None if there are fewer than 3."""
    sections = _section_details(answer, _OTHER_LEVELS)
    if sections is not None:
        return sections
    details = _bullet_details(answer, rules)
    are_long = (
        _num_content_characters(answer, each) >= _MIN_CONTENT_CHARACTERS for each in details
    )
    return details if len(details) >= _MIN_POINTS and all(are_long) else None


def has_list(answer: str) -> bool:
    """Return whether the answer has an ordered or unordered list of at least three points.

    For the shares of the paper's section 2.1, which asks neither for colons nor for prose.
    """
    return len(_outermost_bullets(answer)) >= _MIN_POINTS or any(
        len(points) >= _MIN_POINTS for points in _lists(answer)
    )


def _outermost_bullets(answer: str) -> list[re.Match[str]]:
    bullets = list(_BULLET.finditer(answer))
    outermost = min((len(bullet["indent"].expandtabs(4)) for bullet in bullets), default=0)
    return [b for b in bullets if len(b["indent"].expandtabs(4)) <= outermost + 1]


def _bullet_details(answer: str, rules: StructureRules) -> list[_Detail]:
    bullets = _outermost_bullets(answer)
    details: list[_Detail] = []
    for index, bullet in enumerate(bullets):
        end = bullets[index + 1].start() if index + 1 < len(bullets) else len(answer)
        colon = _COLON.match(answer, bullet.end(), end)
        root_end = None if colon is None else colon.end()
        if root_end is None and rules.points_without_colon:
            dash = _ROOT_DASH.search(answer, bullet.end(), _line_end(answer, bullet.end()))
            root_end = None if dash is None else dash.end()
        if root_end is None:
            continue
        paragraph = _NEXT_PARAGRAPH.search(answer, root_end, end)
        detail = _trimmed_detail(answer, root_end, paragraph.start() if paragraph else end)
        if detail is not None:
            details.append(detail)
    return details


def _section_details(answer: str, levels: range) -> list[_Detail] | None:
    """Return what is below the headings of the highest of the levels that at least three have.

    Lower headings belong to the detail of theirs. None if there are fewer than three details. Parts
    of a script or song continue each other, so they are no sections: their headings say so, or are
    emphasised names that repeat.
    """
    headings = [
        heading
        for heading in _HEADING.finditer(answer)
        if heading["marks"] or heading["emphasised"] or _LISTED.match(answer, heading.end())
    ]
    counts = Counter(map(_heading_level, headings))
    level = min((each for each in levels if counts[each] >= _MIN_POINTS), default=None)
    if level is None:
        return None
    bounds = [heading for heading in headings if _heading_level(heading) <= level]
    names = [heading[0].strip().casefold() for heading in bounds]
    repeats = level == _EMPHASISED_LEVEL and len(set(names)) < len(names)
    if repeats or any(map(_CONTINUED.match, names)):
        return None
    details: list[_Detail] = []
    for index, heading in enumerate(bounds):
        if _heading_level(heading) < level:
            continue
        start, is_last = heading.end(), index + 1 == len(bounds)
        end = len(answer) if is_last else bounds[index + 1].start()
        if level == _LIST_LEVEL:
            items = _LISTED.match(answer, start)
            paragraph = items and _NEXT_UNLISTED.search(answer, items.end(), end)
            end = paragraph.start() if paragraph else end
        elif is_last:
            end = _last_section_end(answer, start, end, details)
        detail = _trimmed_section(answer, start, end)
        if detail and _num_content_characters(answer, detail) >= _MIN_CONTENT_CHARACTERS:
            details.append(detail)
    return details if len(details) >= _MIN_POINTS else None


def _last_section_end(answer: str, start: int, end: int, others: Sequence[_Detail]) -> int:
    """Return where the closing of the answer begins: at a rule, or after the section's paragraphs.

    A section has at most as many as the `others`: its thread does not know that it is the last one.
    """
    rule = _RULE.search(answer, start, end)
    end = rule.start() if rule else end
    most = max((_num_paragraphs(answer, each.start, each.end) for each in others), default=1)
    breaks = _paragraph_breaks(answer, start, end)
    return breaks[most - 1] if len(breaks) >= most else end


def _num_paragraphs(answer: str, start: int, end: int) -> int:
    return len(_paragraph_breaks(answer, start, end)) + 1


def _paragraph_breaks(answer: str, start: int, end: int) -> list[int]:
    """Return where the paragraphs of a section end, without the last; items of lists are none."""
    content = end - len(answer[start:end].lstrip())
    return [match.start() for match in _NEXT_UNLISTED.finditer(answer, content, end)]


def _trimmed_section(answer: str, start: int, end: int) -> _Detail | None:
    """Return the detail without whitespace and a rule at its end; None if nothing is left."""
    detail = _trimmed_detail(answer, start, end)
    rule = detail and _RULE_AT_END.search(answer, detail.start, detail.end)
    return _trimmed_detail(answer, start, rule.start()) if rule else detail


def _heading_level(heading: re.Match[str]) -> int:
    """Return 1 to 6 for the headings of Markdown, 7 for emphasised lines, 8 for others."""
    if heading["marks"]:
        return len(heading["marks"])
    return _EMPHASISED_LEVEL if heading["emphasised"] else _LIST_LEVEL


_BLANK_LINES = re.compile(rf"\n[{_BLANK}\r]*\n\s*")
_ITEM = re.compile(rf"^(?P<indent>[{_BLANK}]*){_ITEM_MARK}", re.MULTILINE)

# Openings that announce the answer without content: no thread could continue from one alone.
_INTERJECTION = re.compile(
    r"\W*(?:(?:sure|certainly|absolutely|definitely|of course|okay|ok|yes|no|great|great question|"
    r"hello|hi|hey|aloha|thank you|thanks|you're welcome)[!.]|"
    r"(?:好的|当然|もちろん|はい)[！。])\W*\Z",  # noqa: RUF001
    re.IGNORECASE,
)


def _paragraph_details(answer: str, rules: StructureRules) -> list[_Detail] | None:
    """Return what follows each paragraph's first sentence; None if there are too few of them.

    Paragraphs of one sentence are skipped. Lines that introduce a list are a root whatever they end
    with, and "Sure!" is only a root together with the next sentence.
    """
    spans = list(_paragraph_spans(answer))
    if len(spans) < rules.least_paragraphs:
        return None
    details = [
        detail
        for start, end in spans
        if (detail := _paragraph_detail(answer, start, end)) is not None
    ]
    return details if len(details) >= rules.least_paragraph_forks else None


def _paragraph_spans(answer: str) -> Iterator[tuple[int, int]]:
    start = 0
    for blank in _BLANK_LINES.finditer(answer):
        if blank.start() > start:
            yield start, blank.start()
        start = blank.end()
    if answer[start:].strip():
        yield start, len(answer)


def _paragraph_detail(answer: str, start: int, end: int) -> _Detail | None:
    paragraph = answer[start:end]
    root_end = _root_end(paragraph)
    lead_end = _lead_end(paragraph)
    if lead_end is not None and (root_end is None or lead_end < root_end):
        root_end = lead_end
    return None if root_end is None else _trimmed_detail(answer, start + root_end, end)


def _root_end(paragraph: str) -> int | None:
    end = first_sentence_end(paragraph)
    if end is None or _INTERJECTION.match(paragraph, 0, end) is None:
        return end
    second = first_sentence_end(paragraph[end:])
    return None if second is None else end + second


def _lead_end(paragraph: str) -> int | None:
    """Return the end of the lines that introduce a list in the paragraph, or None."""
    first = _ITEM.match(paragraph)
    item = _ITEM.search(paragraph, first.end() if first is not None else 0)
    if item is None or (first is not None and _level(item) <= _level(first) + 1):
        return None
    return len(paragraph[: item.start()].rstrip()) or None


def _level(item: re.Match[str]) -> int:
    return len(item["indent"].expandtabs(4))
