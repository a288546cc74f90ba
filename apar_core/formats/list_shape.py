"""Where an ordinary list can be written in parallel: after the heads of its items.

Four readers of text that grows piece by piece; a piece is the text of one token. `ListFinder` finds
the head of a list's second item, and `HeadReader` the end of a later head. `DetailReader` finds the
end of an item's detail. `NextLineReader` tells whether another item follows. They take time linear
in the text. Any split of it into pieces gives the same result, but a piece is kept as a whole.

A list is found only if its first item has a head and a detail. Code, tables, quotes, thoughts and
nested lists are never read as items. Text in the piece of a mark that begins or ends a thought is
not read either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

MAX_HEAD_CHARACTERS = 100
MIN_DETAIL_CHARACTERS = 20
# As much of a line as any marker and head need.
_KEPT_CHARACTERS = MAX_HEAD_CHARACTERS + 40
_FENCE_CHARACTERS = 8
_INDENT = r" {0,3}"
_BULLETS = "-*+•"
_MARKER = re.compile(
    rf"(?P<before>{_INDENT}(?:\#{{1,6}}[ ]+)?[*_]{{0,3}}(?:[A-Z][a-z]{{1,11}}[ ])?)"
    r"(?P<number>[1-9][0-9]{0,2})(?P<after>[.):][*_]{0,3})(?=\s)"
    rf"|(?P<bullet>{_INDENT}[{_BULLETS}])(?=[ ])"
)
_BEGINS_MARKER = re.compile(
    rf"{_INDENT}(?:(?:\#{{1,6}}[ ]*)?[*_]{{0,3}}(?:[A-Z][a-z]{{0,11}}[ ]?)?"
    rf"(?:[0-9]{{1,3}}[.):]?[*_]{{0,3}})?|[{_BULLETS}])\Z"
)
# A colon or a dash, with the emphasis marks around it.
_HEAD_END = re.compile(r"[*_]{0,3}:[*_]{0,3}(?=\s|\Z)|[*_]{0,3}：[*_]{0,3}| [-–—](?=\s)")  # noqa: RUF001
_BOLD_LEAD = re.compile(r"\s*(?P<mark>\*\*|__)[^*_]+(?P=mark)(?=\s+\w)")
_SENTENCE_END = tuple(".!?;,")
_LINE = "\n"
# What begins and ends a thought in the chat templates of DeepSeek, Qwen, MiniMax, Seed, Mistral,
# Cohere, Kimi and gpt-oss. Within a line an answer only writes about such a mark.
_BEGINS_THOUGHT = re.compile(
    r"<(?:\w{1,8}:)?think(?:ing)?>|<thought>|<reasoning>|\[THINK\]|<\|START_THINKING\|>|◁think▷"
    r"|<\|channel\|>analysis"
)
_ENDS_THOUGHT = re.compile(
    r"</(?:\w{1,8}:)?think(?:ing)?>|</thought>|</reasoning>|\[/THINK\]|<\|END_THINKING\|>|◁/think▷"
    r"|<\|channel\|>final"
)
_MARK_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class Marker:
    """What an item begins with: `**Step 3:` has `**Step `, 3 and `:`; a bullet has no number."""

    before: str
    number: int | None
    after: str

    @classmethod
    def of_match(cls, match: re.Match[str]) -> Marker:
        """Return the marker of a match of the pattern of markers."""
        if match["bullet"] is not None:
            return cls(match["bullet"], None, "")
        return cls(match["before"], int(match["number"]), match["after"])

    @property
    def key(self) -> tuple[str, str]:
        """What the markers of one list have in common; emphasis may differ."""
        if self.number is None:
            return self.before, ""
        return self.before.replace("*", "").replace("_", ""), self.after[0]

    @property
    def level(self) -> int:
        """Numbered headings contain numbered items, and these contain bullets."""
        if self.number is None:
            return 1
        return 3 if "#" in self.before else 2

    def is_inside(self, other: Marker) -> bool:
        """Return whether items with this marker are nested in items with another one."""
        return self.level < other.level or _indent(self.before) > _indent(other.before)

    def text(self, number: int) -> str:
        """Return the marker with another number."""
        return self.before if self.number is None else f"{self.before}{number}{self.after}"


@dataclass(frozen=True, slots=True)
class ListShape:
    r"""The shape of a list, learned from its first item.

    marker: that of the first item.
    head_end: what a head ends with: `:`, `**:`, `:**`, ` -`, `**`, or `\n` for the end of the line.
    separator: `\n` or `\n\n`, between two items.
    has_lines, has_paragraphs, has_headings: whether the first detail goes on in a new line, after
        an empty line, or with a heading. Otherwise such a line does not belong to an item.
    """

    marker: Marker
    head_end: str
    separator: str
    has_lines: bool = False
    has_paragraphs: bool = False
    has_headings: bool = False


@dataclass(frozen=True, slots=True)
class FoundList:
    """A list whose second head has just ended.

    number: that of its second item; for bullets 2.
    num_before: pieces before the second item. lead: text of the next piece that is still before it.
    ends_line: whether the head's last piece ends its line.
    """

    shape: ListShape
    number: int
    num_before: int
    lead: str
    ends_line: bool = False


class HeadState(Enum):
    """Whether a head has ended, or cannot end any more."""

    OPEN = "open"
    ENDED = "ended"
    FAILED = "failed"


class HeadReader:
    """Finds the end of a head, in the text after its marker."""

    def __init__(self, marker: Marker, head_end: str) -> None:
        self._around = marker.before + marker.after
        self._head_end = head_end
        self._text = ""

    @property
    def ends_line(self) -> bool:
        """Whether the line has ended with the head."""
        return _LINE in self._text

    def feed(self, piece: str) -> HeadState:
        """Add a piece. A head ends only with the end of a piece, or with white space after it."""
        self._text += piece
        body, line_break, rest = self._text.partition(_LINE)
        if rest.strip() or len(body) > MAX_HEAD_CHARACTERS:
            return HeadState.FAILED
        if self._head_end == _LINE:
            if not line_break:
                return HeadState.OPEN
            return HeadState.ENDED if _has_words(body) else HeadState.FAILED
        head = body.rstrip(" ")
        ends = head.endswith(self._head_end) and _has_words(head[: -len(self._head_end)])
        if ends and _is_balanced(self._around + head):
            return HeadState.ENDED
        return HeadState.FAILED if line_break else HeadState.OPEN


@dataclass(slots=True, eq=False)
class _Item:
    """The last item so far; its line is kept as far as a head may reach."""

    marker: Marker
    line: str = ""
    num_line_characters: int = 0
    num_more_characters: int = 0
    has_lines: bool = False
    has_paragraphs: bool = False
    has_headings: bool = False

    def head(self) -> tuple[str, int] | None:
        """Return what the head ends with, and where in the line; None if there is no head."""
        around, line = self.marker.before + self.marker.after, self.line
        lead = _BOLD_LEAD.match(line, 0, MAX_HEAD_CHARACTERS)
        for match in _HEAD_END.finditer(line, 0, MAX_HEAD_CHARACTERS):
            if lead is not None and lead.end() <= match.start():
                break
            if _has_words(line[: match.start()]) and _is_balanced(around + line[: match.end()]):
                return match[0], match.end()
        if lead is not None:
            return lead["mark"], lead.end()
        text = line.strip()
        is_short = self.num_line_characters <= MAX_HEAD_CHARACTERS and _has_words(text)
        is_heading = self.marker.level == 3 or text.endswith(("**", "__"))
        if is_short and (is_heading or not text.endswith(_SENTENCE_END)):
            return _LINE, self.num_line_characters
        return None

    def shape(self, num_blank_lines: int) -> ListShape | None:
        """Return the shape of the list; None if the item has no head or no detail."""
        head = self.head()
        if head is None:
            return None
        head_end, end = head
        num_characters = self.num_line_characters - end + self.num_more_characters
        is_bold = "**" in self.line[:end] or "__" in self.line[:end]
        if num_characters < MIN_DETAIL_CHARACTERS or (self.marker.number is None and not is_bold):
            return None
        return ListShape(
            self.marker,
            head_end,
            _LINE * (2 if num_blank_lines else 1),
            self.has_lines,
            self.has_paragraphs,
            self.has_headings,
        )


class _Lines:
    """Splits pieces into lines, and knows which of them are code."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self.num_blank = 0
        # What is known of the line: its beginning until it is classified, and whether it is.
        self.line = ""
        self.is_open = True
        self.in_code = False

    def begins_line(self) -> None:
        """Note that a line has ended."""
        self.line = ""
        self.is_open = True

    def is_fence(self) -> bool:
        """Return whether the line opens or closes a block of code."""
        return self.line.lstrip(" ").startswith(("```", "~~~"))

    def add_to_beginning(self, part: str) -> None:
        """Add to a line that is classified, as far as its beginning may show a fence."""
        if len(self.line) < _FENCE_CHARACTERS:
            self.line += part[:_FENCE_CHARACTERS]

    def may_become_marker(self) -> bool:
        """Return whether the line is empty, or as far as it goes the beginning of a marker."""
        return _BEGINS_MARKER.match(self.line) is not None


class ListFinder(_Lines):
    """Finds a list in the text of an answer, where the head of its second item ends.

    `in_thought`: whether the prompt has opened the thought of a reasoning model.
    """

    def __init__(self, *, in_thought: bool = False) -> None:
        super().__init__()
        self._in_thought = in_thought
        self._tail = _LINE
        self._item: _Item | None = None
        self._in_item_line = False
        self._second: tuple[HeadReader, FoundList] | None = None
        self._num_before, self._lead = 0, ""

    def feed(self, piece: str) -> FoundList | None:
        """Add a piece; return a list whose second head ends with it."""
        if not self._follow_thought(piece):
            self.num_pieces += 1
            return None
        found = self._found() if self._reads_second(piece) is HeadState.ENDED else None
        position = 0
        before = self._second
        for number, part in enumerate(piece.split(_LINE)):
            if number:
                if self._second is not before:  # Its line has begun, and ends, in this piece.
                    self._reads_second(_LINE)
                self._end_line()
                position += 1
                is_last = position == len(piece)
                self._num_before = self.num_pieces + is_last
                self._lead = "" if is_last else piece[:position]
            if part:
                self._add(part)
            position += len(part)
        self.num_pieces += 1
        if found is None and self._reads_second("") is HeadState.ENDED:
            found = self._found()
        return found

    def decline(self) -> None:
        """Go on without the list that was found: its second item may be the first of another."""
        self._second = None

    def _found(self) -> FoundList:
        assert self._second is not None
        reader, found = self._second
        return replace(found, ends_line=reader.ends_line)

    def _follow_thought(self, piece: str) -> bool:
        """Return whether a piece is part of the answer, not of a thought or its marks."""
        self._tail = (self._tail + piece)[-(len(piece) + _MARK_CHARACTERS) :]
        in_thought = _ends_in_thought(self._tail)
        if in_thought is None:
            return not self._in_thought
        self._in_thought, self._tail = in_thought, _LINE
        self._item = self._second = None
        self.in_code = False
        self.begins_line()
        self.is_open = not self._in_thought
        return False

    def _reads_second(self, piece: str) -> HeadState:
        if self._second is None:
            return HeadState.FAILED
        state = self._second[0].feed(piece)
        if state is HeadState.FAILED:
            self._second = None
        return state

    def _add(self, part: str) -> None:
        if self._in_item_line and self._item is not None:
            self._add_to_item_line(self._item, part)
        elif not self.is_open:
            self.add_to_beginning(part)
            self._count(part)
        else:
            self.line += part
            match = None if self.in_code else _MARKER.match(self.line)
            if match is not None:
                self._classify_item(match)
            elif self.in_code or not self.may_become_marker():
                self._classify_text()

    def _end_line(self) -> None:
        if self.is_open and self.line.strip():
            match = None if self.in_code else _MARKER.match(self.line + _LINE)
            if match is not None:
                self._classify_item(match)
            else:
                self._classify_text()
        elif self.is_open:
            self.num_blank += 1
        if self.is_fence():
            self.in_code = not self.in_code
            # Steps with code build on each other.
            self._item = self._second = None
        self._in_item_line = False
        self.begins_line()

    def _classify_item(self, match: re.Match[str]) -> None:
        marker, item = Marker.of_match(match), self._item
        if item is not None and marker.is_inside(item.marker) and not _is_over(item):
            self._classify_text()
            return
        rest = self.line[match.end() :]
        self._second = None
        if item is not None and marker.key == item.marker.key and _follows(marker, item.marker):
            shape = item.shape(self.num_blank)
            if shape is not None:
                reader = HeadReader(shape.marker, shape.head_end)
                number = 2 if marker.number is None else marker.number
                found = FoundList(shape, number, self._num_before, self._lead)
                self._second = reader, found
                if reader.feed(rest) is HeadState.FAILED:
                    self._second = None
        self._item = _Item(marker)
        self._in_item_line, self.is_open, self.num_blank = True, False, 0
        self._add_to_item_line(self._item, rest)

    def _classify_text(self) -> None:
        """Note what a line that begins no item says about the detail that it may belong to."""
        self.is_open = False
        item, line = self._item, self.line
        if item is not None and not self.in_code and not _is_nested(line):
            if line.startswith("#"):
                item.has_headings = True
            if self.num_blank:
                item.has_paragraphs = True
            else:
                item.has_lines = True
        self.num_blank = 0
        self._count(line)

    def _count(self, text: str) -> None:
        if self._item is not None:
            self._item.num_more_characters += len(text)

    @staticmethod
    def _add_to_item_line(item: _Item, text: str) -> None:
        item.num_line_characters += len(text)
        item.line = (item.line + text)[:_KEPT_CHARACTERS]


def _ends_in_thought(text: str) -> bool | None:
    """Return whether the last mark of a text begins a thought; None if there is no mark."""
    marks = [(match.start(), False) for match in _ENDS_THOUGHT.finditer(text)]
    for match in _BEGINS_THOUGHT.finditer(text):
        if text[: match.start()].rstrip(" ").endswith(_LINE):
            marks.append((match.start(), True))
    return max(marks)[1] if marks else None


def begins_thought_at_end(text: str) -> bool:
    """Return whether a text ends with a mark that begins a thought, as a prompt may."""
    return any(not text[match.end() :].strip() for match in _BEGINS_THOUGHT.finditer(text))


class DetailEnd(Enum):
    """Why a detail has ended: another item begins, or a line that belongs to no item."""

    ITEM = "item"
    LIST = "list"


class DetailReader(_Lines):
    """Finds the end of an item's detail.

    num_kept: how many of its pieces certainly belong to the detail; a piece that is only partly the
        detail's is not among them.
    """

    def __init__(self, shape: ListShape, *, begins_line: bool = False) -> None:
        super().__init__()
        self._shape = shape
        self.num_kept = 0
        # The detail's part of the piece after those that are kept.
        self._partial = ""
        self._num_line_breaks = 0
        # All text after the last that certainly belongs to the detail.
        self._tail = ""
        self._has_text = False
        self._line_is_text = False
        # Usually the detail begins within the line of its head.
        self.is_open = begins_line or shape.head_end == _LINE
        self.line = "" if self.is_open else "x"

    def feed(self, piece: str) -> DetailEnd | None:
        """Add a piece; return why the detail ends, if the piece shows it."""
        self.num_pieces += 1
        text_end = -1
        position = 0
        end: DetailEnd | None = None
        for number, part in enumerate(piece.split(_LINE)):
            if number:
                was_open = self.is_open
                end = self._end_line()
                if was_open and self._line_is_text and end is None:
                    text_end = position
                position += 1
            if end is None and part:
                end = self._add(part)
            if end is not None:
                break
            position += len(part)
            if not self.is_open and part:
                text_end = position
                self._has_text = self._has_text or not part.isspace()
        if text_end < 0:
            self._tail += piece
            return end
        rest = self._tail = piece[text_end:]
        if rest.strip():
            self.num_kept, self._partial = self.num_pieces - 1, piece[:text_end]
            self._num_line_breaks = 0
        else:
            self.num_kept, self._partial = self.num_pieces, ""
            self._num_line_breaks = rest.count(_LINE)
        return end

    def closing(self, end: DetailEnd | None) -> tuple[str, str]:
        """Return the detail's text after the pieces that are kept, and the text before a next item.

        `end` is why it has ended; None if it has ended by itself, so that all pieces are kept.
        """
        if end is None:
            num_line_breaks = 0 if self._tail.strip() else self._tail.count(_LINE)
            return "", self._shape.separator[num_line_breaks:]
        return self._partial, self._shape.separator[self._num_line_breaks :]

    def _add(self, part: str) -> DetailEnd | None:
        if not self.is_open:
            self.add_to_beginning(part)
            return None
        self.line += part
        if self.in_code:
            self.is_open = False
            return None
        match = _MARKER.match(self.line)
        if match is not None:
            return self._classify(match)
        return None if self.may_become_marker() else self._classify(None)

    def _end_line(self) -> DetailEnd | None:
        end = None
        self._line_is_text = bool(self.line.strip())
        if self.is_open and self._line_is_text:
            end = self._classify(None if self.in_code else _MARKER.match(self.line + _LINE))
        elif self.is_open:
            self.num_blank += 1
        if self.is_fence():
            self.in_code = not self.in_code
        self.begins_line()
        return end

    def _classify(self, match: re.Match[str] | None) -> DetailEnd | None:
        marker = None if match is None else Marker.of_match(match)
        own = self._shape.marker
        if marker is not None and marker.key == own.key:
            return DetailEnd.ITEM
        if not self._belongs(marker):
            return DetailEnd.LIST
        self.is_open, self.num_blank, self._has_text = False, 0, True
        return None

    def _belongs(self, marker: Marker | None) -> bool:
        """Return whether a line with this marker of another kind belongs to the detail."""
        shape, line = self._shape, self.line
        if not self._has_text or self.in_code:
            return True
        if marker is not None:
            return marker.is_inside(shape.marker)
        if _is_nested(line):
            return True
        if line.startswith("#"):
            return shape.has_headings
        if self.num_blank:
            return shape.has_paragraphs
        return shape.has_lines or shape.has_paragraphs


class NextLine(Enum):
    """What follows the items that are known: another one, or anything else."""

    OPEN = "open"
    ITEM = "item"
    OTHER = "other"


class NextLineReader:
    """Reads whether a text goes on with the next item of a list.

    `number` is that of the next item; bullets have none. `begins_line`: whether the text so far
    ends with a line break.
    """

    def __init__(self, shape: ListShape, number: int, *, begins_line: bool = False) -> None:
        marker = shape.marker
        self._marker = marker if marker.number is None else replace(marker, number=number)
        self._text = _LINE if begins_line else ""

    def feed(self, piece: str) -> NextLine:
        """Add a piece."""
        self._text += piece
        blank, _, line = self._text.rpartition(_LINE)
        if blank.strip() or not self._text.startswith((_LINE, " ")):
            return NextLine.OTHER
        match = _MARKER.match(line)
        if match is not None:
            is_next = Marker.of_match(match) == self._marker and _LINE in self._text
            return NextLine.ITEM if is_next else NextLine.OTHER
        return NextLine.OPEN if _BEGINS_MARKER.match(line) else NextLine.OTHER


def _follows(marker: Marker, before: Marker) -> bool:
    return marker.number is None or before.number is None or marker.number == before.number + 1


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _is_over(item: _Item) -> bool:
    """Return whether text after an item has ended its list, as far as one can tell."""
    return item.has_paragraphs and item.marker.level < 3


def _is_nested(line: str) -> bool:
    """Return whether a line is indented, a bullet, a quote, a row of a table or a fence."""
    return line[0] in " \t|>`~" or (line[0] in _BULLETS and not line.startswith("**"))


def _has_words(text: str) -> bool:
    return bool(text.strip(" *_:-–—"))  # noqa: RUF001


def _is_balanced(text: str) -> bool:
    """Return whether every double emphasis mark is closed."""
    return text.count("**") % 2 == 0 and text.count("__") % 2 == 0
