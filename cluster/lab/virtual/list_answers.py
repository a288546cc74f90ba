"""Recorded answers as a model that writes lists in parallel would generate them.

What the root thread generates depends on which lists the engine writes in parallel, so the tokens
of a thread are not fixed: `ListAnswer.script` returns them for what the thread has read. The text
is that of the recording, cut where the readers of `formats/list_shape.py` cut it. What a recording
cannot show is assumed: a detail is followed by the marker of another item, with which its thread
ends, and items after the end of a list are those before it once more. The engine drops their
tokens, as it does for a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice, takewhile

from apar_core.errors import EvaluationError
from apar_core.formats.list_shape import (
    DetailEnd,
    DetailReader,
    FoundList,
    HeadReader,
    HeadState,
    ListFinder,
    ListShape,
    NextLine,
    NextLineReader,
)
from apar_core.formats.lists import ListRules
from apar_core.tree.thread_names import ThreadPath

LIST_ANSWER_ARG = "apar_list_answer"
"""Key of `SamplingParams.extra_args`: a `ListAnswer` as JSON text."""
_BLANK_LINES = re.compile(r"[ \n]*\n")


@dataclass(frozen=True, slots=True)
class ParallelItem:
    """What the threads of one item's block generate: its detail, and the head of the next item."""

    detail: list[int]
    next_head: list[int]


@dataclass(frozen=True, slots=True)
class ParallelList:
    """A list that the engine may write in parallel.

    start: position of its second item in the tokens of the answer.
    items: from the second on, and those after its end that may be written before it is known.
    """

    start: int
    items: list[ParallelItem]


@dataclass(frozen=True, slots=True)
class ListAnswer:
    """An answer as tokens.

    prompt_tokens: their number. flat: tokens of the text and one end token; line breaks between two
        items are those between the first two.
    lists: by position. The same items may be in several lists: one that the engine declines is
        found again at a later item.
    """

    prompt_tokens: int
    flat: list[int]
    lists: list[ParallelList]

    def script(self, path: ThreadPath, read: Sequence[int]) -> list[int]:
        """Return what a thread generates after the tokens that it reads, end token included."""
        own = read[self.prompt_tokens :]
        if not path:
            return self.flat[len(own) :]
        pairs = zip(own, self.flat, strict=False)
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        found = next((each for each in reversed(self.lists) if each.start <= num_same), None)
        if found is None or len(path) > len(found.items):
            raise EvaluationError(f"the recorded answer has no text for the thread at {path}")
        item = found.items[len(path) - 1]
        # The children of a block are the detail and the head.
        return item.next_head if path[-1] % 2 else item.detail

    def to_text(self) -> str:
        """Return the answer as a value of `extra_args`."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> ListAnswer:
        """Return the answer that `to_text` wrote."""
        values = json.loads(text)
        lists = [
            ParallelList(each["start"], [ParallelItem(**item) for item in each["items"]])
            for each in values.pop("lists")
        ]
        return cls(**values, lists=lists)


def list_answer(text: str, rules: ListRules, prompt_tokens: int, end_id: int) -> ListAnswer:
    """Return an answer for the engine to write. Raises EvaluationError if its text is lost."""
    answer = _Writer(text, rules, end_id).answer(prompt_tokens)
    if _words("".join(map(rules.text_of, answer.flat[:-1]))) != _words(text):
        raise EvaluationError("the threads of a list do not join to its recorded text")
    return answer


@dataclass(frozen=True, slots=True)
class _Item:
    """An item of a list, from the second on.

    start: position of its marker in the text. head: the text after the marker. position: where the
    head ends.
    """

    start: int
    marker: str
    head: str
    detail: str
    position: int

    @property
    def end(self) -> int:
        """Position in the text where its detail ends."""
        return self.position + len(self.detail)


@dataclass(frozen=True, slots=True)
class _List:
    """The items of a list.

    end_number: number of the item that would follow. failed_head: what stands after its marker if
    there is one, and it is no head.
    """

    shape: ListShape
    items: list[_Item]
    end_number: int
    failed_head: str | None


class _Writer:
    """Finds the lists of an answer, and writes the scripts of their threads."""

    def __init__(self, text: str, rules: ListRules, end_id: int) -> None:
        self._text = text
        self._rules = rules
        self._end_id = end_id

    def answer(self, prompt_tokens: int) -> ListAnswer:
        """Return the tokens of the text, and the threads of each list that may be found in it."""
        first_found, found = self._lists()
        flat: list[int] = []
        # Tokens before the positions of the text at which the items of lists begin.
        num_before: dict[int, int] = {}
        written = start = 0
        while start in first_found:
            each = first_found[start]
            flat += self._encode(self._text[written : each.items[0].start])
            for number, item in enumerate(each.items):
                flat += self._encode(each.shape.separator) if number else []
                num_before[item.start] = len(flat)
                flat += self._encode(item.marker)
                flat += self._encode(item.head)
                flat += self._encode(item.detail)
            written = start = each.items[-1].end
        flat += self._encode(self._text[written:])
        lists = {
            num_before[first]: ParallelList(num_before[first], self._threads(each))
            for each in found
            if (first := each.items[0].start) in num_before
        }
        ordered = [lists[position] for position in sorted(lists)]
        return ListAnswer(prompt_tokens, [*flat, self._end_id], ordered)

    def _lists(self) -> tuple[dict[int, _List], list[_List]]:
        """Return the lists that are found if every one is written in parallel, and all others.

        The former by the position where the root begins to look for a list: the start, and the ends
        of lists. The others follow a list that the engine has declined.
        """
        first_found: dict[int, _List] = {}
        found: list[_List] = []
        starts = [0]
        for start in starts:
            finder = ListFinder()
            for position, character in enumerate(self._text[start:], start + 1):
                of_list = finder.feed(character)
                if of_list is None:
                    continue
                finder.decline()
                each = self._list(of_list, start + of_list.num_before, position)
                first_found.setdefault(start, each)
                found.append(each)
                end = each.items[-1].end
                if end not in starts:
                    starts.append(end)
        return first_found, found

    def _list(self, found: FoundList, start: int, position: int) -> _List:
        """Read a list; `start` and `position` are where its second item and the detail begin."""
        shape, number, text = found.shape, found.number, self._text
        marker = shape.marker.text(number)
        head = text[start:position].removeprefix(marker)
        items: list[_Item] = []
        begins_line = found.ends_line
        while True:
            end, is_line_end = self._end_of_detail(shape, position, begins_line=begins_line)
            items.append(_Item(start, marker, head, text[position:end], position))
            number += 1
            marker = shape.marker.text(number)
            blank = _BLANK_LINES.match(text, end)
            begin = end if blank is None else blank.end()
            follows = self._has_next(shape, number, end, begins_line=is_line_end)
            if not follows or not text.startswith(marker, begin):
                return _List(shape, items, number, None)
            start, begin = begin, begin + len(marker)
            state, position, begins_line = self._end_of_head(shape, begin)
            head = text[begin:position]
            if state is not HeadState.ENDED:
                return _List(shape, items, number, head)

    def _threads(self, found: _List) -> list[ParallelItem]:
        """Return what the threads of a list generate."""
        items = list(found.items)
        heads = [self._encode(item.head) for item in items[1:]]
        if found.failed_head is not None:
            heads.append([*self._encode(found.failed_head), self._end_id])
        else:
            beyond = list(islice(cycle(items), self._rules.items.ahead))
            heads += [self._encode(item.head) for item in (*beyond, items[0])]
            items += beyond
        number = found.end_number - len(found.items)
        threads: list[ParallelItem] = []
        for item, next_head in zip(items, heads, strict=True):
            number += 1
            following = f"{found.shape.separator}{found.shape.marker.text(number)} "
            detail = [*self._encode(item.detail), *self._encode(following), self._end_id]
            threads.append(ParallelItem(detail, next_head))
        return threads

    def _encode(self, text: str) -> list[int]:
        return list(self._rules.encode(text))

    def _end_of_detail(
        self, shape: ListShape, position: int, *, begins_line: bool
    ) -> tuple[int, bool]:
        """Return where a detail ends, and whether with a line break."""
        reader = DetailReader(shape, begins_line=begins_line)
        end = None
        for character in self._text[position:]:
            end = reader.feed(character)
            if end is not None:
                break
        if end is None and reader.num_kept < reader.num_pieces:
            end = DetailEnd.LIST  # It may be the marker of another item.
        _, closing = reader.closing(end)
        num_kept = len(self._text) - position if end is None else reader.num_kept
        return position + num_kept, len(closing) < len(shape.separator)

    def _has_next(self, shape: ListShape, number: int, position: int, *, begins_line: bool) -> bool:
        """Return whether another item follows."""
        reader = NextLineReader(shape, number, begins_line=begins_line)
        states = map(reader.feed, self._text[position:])
        return next((each for each in states if each is not NextLine.OPEN), None) is NextLine.ITEM

    def _end_of_head(self, shape: ListShape, position: int) -> tuple[HeadState, int, bool]:
        """Return whether a head ends or fails, where, and whether it ends its line."""
        reader = HeadReader(shape.marker, shape.head_end)
        for index, character in enumerate(self._text[position:], position + 1):
            state = reader.feed(character)
            if state is not HeadState.OPEN:
                return state, index, reader.ends_line
        return HeadState.FAILED, len(self._text), False


def _words(text: str) -> list[str]:
    """Return the words; of those that tokens may split within a character, what can be compared."""
    return text.encode("ascii", "ignore").decode().split()
