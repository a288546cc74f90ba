"""Threads of an ordinary list: its items' details are written in parallel, without trained tokens.

A thread that has ended the head of a list's second item opens two threads: the *detail* of that
item, and the *head* of the next one. A head thread that has ended its head does the same, and ends.
In reading order this is the list. Every detail but the second reads only the first item and its own
head (`ListRun.num_before`): after a row of bare heads a model writes bare heads.

The root thread decides how far the list goes. When an item is complete, the root continues after it
(it *probes*): where it begins another item, it drops those tokens and waits for the one that is
being written; else the list ends there, the threads of later items are cancelled, and the root goes
on. So the length of the list, and all that follows it, is what the model writes after reading every
item. Scheduler and API process read the same tokens, and agree without messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from apar_core.errors import CheckpointError
from apar_core.formats.blocks import BlockChild, OpenBlock
from apar_core.formats.control_tokens import Tokenizer
from apar_core.formats.list_shape import (
    DetailEnd,
    DetailReader,
    HeadReader,
    HeadState,
    ListFinder,
    ListShape,
    NextLine,
    NextLineReader,
    begins_thought_at_end,
)
from apar_core.formats.parallel_format import ListItems, ParallelFormat
from apar_core.formats.resolved_format import encode_behind, token_texts

_THOUGHT_TOKENS = 16


class _EveryToken:
    """Container of all tokens: each is read."""

    def __contains__(self, token_id: object) -> bool:
        return True


@dataclass(slots=True)
class ListItem:
    """What is known of an item.

    header: tokens of its marker and head; those of the second item stand in the root's text.
    text: tokens of its detail, once that has ended. closing: text between it and the next item,
        without line breaks that the detail ends with.
    failed: whether its thread has written no head. refused: whether the thread of its detail was
        not opened, so that the root writes the detail itself.
    """

    header: tuple[int, ...] = ()
    text: tuple[int, ...] | None = None
    closing: str = ""
    failed: bool = False
    refused: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the root may continue after it, or without it."""
        return self.text is not None or self.failed


@dataclass(slots=True)
class ListRun:
    """What the threads of one list have in common, in one process.

    num_before: tokens between the last join of the root and its second item. lead: text before an
        item's marker that is not among them.
    first_number: number of the second item. number: of the item that the root waits for, or after
        which it probes.
    """

    shape: ListShape
    num_before: int
    lead: str
    first_number: int
    number: int
    items: dict[int, ListItem] = field(default_factory=dict)

    def item(self, number: int) -> ListItem:
        """Return what is known of an item."""
        return self.items.setdefault(number, ListItem())

    @property
    def is_declined(self) -> bool:
        """Whether no thread was opened: the root writes on as if there were no list."""
        return self.number == self.first_number and self.item(self.number).refused

    @property
    def gives_item(self) -> bool:
        """Whether the root continues after an item of other threads, not after its own tokens."""
        return not (self.item(self.number).failed or self.is_declined)


@dataclass(frozen=True, slots=True)
class ListBlock(OpenBlock):
    """The detail of an item and the head of the next.

    num_read: tokens from the last join of the root to the end of the item's head, on the path of
        the thread that has opened the block.
    num_skipped: those that the detail does not read.
    ends_line: whether the head ends its line.
    """

    run: ListRun
    number: int
    num_read: int
    num_skipped: int
    ends_line: bool

    def inherited(self, segment_start: int) -> tuple[int, int]:
        """Return how many tokens of the thread's sequence detail and head inherit.

        `segment_start` counts those before the thread's last join.
        """
        num_tokens = segment_start + (self.num_inherited or 0)
        return num_tokens - self.num_skipped, num_tokens


@dataclass(frozen=True, slots=True)
class NextItem:
    """The root has begun another item: it drops its tokens since the last join, and waits."""

    run: ListRun


@dataclass(frozen=True, slots=True)
class ListEnd:
    """The root has continued with anything else: the list ends with item `number`."""

    number: int


ListMark = ListBlock | NextItem | ListEnd


class DetailThread:
    """Reads what the thread of an item's detail generates."""

    def __init__(self, rules: ListRules, run: ListRun, number: int, *, begins_line: bool) -> None:
        self.rules, self.run, self.number = rules, run, number
        self._reader = DetailReader(run.shape, begins_line=begins_line)
        self._end: DetailEnd | None = None

    @property
    def num_certain(self) -> int:
        """How many of its tokens certainly stay in the text, if the item does."""
        return self._reader.num_kept

    def read(self, token_id: int, *, stopped: bool) -> bool:
        """Read a token; return whether the detail ends before it."""
        self._end = self._reader.feed(self.rules.text_of(token_id))
        if stopped and self._end is None and self._reader.num_kept < self._reader.num_pieces:
            self._end = DetailEnd.LIST  # What may not belong to the item is no text.
        return self._end is not None

    def num_text(self, num_own: int) -> int:
        """Return how many tokens of an ended thread are text."""
        return num_own if self._end is None else min(num_own, self._reader.num_kept)

    @property
    def forced_ids(self) -> tuple[int, ...]:
        """Tokens of the text after its own: a part of a token that is not kept as a whole."""
        return self.rules.encode(self._reader.closing(self._end)[0])

    def ends(self, own: Sequence[int], *, refused: bool = False) -> None:
        """Note that the thread has ended, and with which tokens, without an end token.

        `refused`: it was not opened.
        """
        item = self.run.item(self.number)
        item.refused = refused
        item.text = (*own[: self.num_text(len(own))], *self.forced_ids)
        item.closing = self._reader.closing(self._end)[1]


class HeadThread:
    """Reads what the thread of an item's head generates, after the item's marker."""

    def __init__(self, rules: ListRules, run: ListRun, number: int, num_read: int) -> None:
        self.rules, self.run, self.number = rules, run, number
        self._num_read = num_read
        self._reader = HeadReader(run.shape.marker, run.shape.head_end)
        self._own: list[int] = []
        self._state = HeadState.OPEN

    @property
    def has_ended(self) -> bool:
        """Whether it has written a head."""
        return self._state is HeadState.ENDED

    @property
    def num_certain(self) -> int:
        """How many of its tokens certainly stay in the text, if the item does."""
        return len(self._own) if self.has_ended else 0

    def read(self, token_id: int, *, stopped: bool) -> ListBlock | bool | None:
        """Read a token; return the block that opens after it, or True if there will be no head."""
        self._own.append(token_id)
        self._state = self._reader.feed(self.rules.text_of(token_id))
        if stopped:
            self._state = HeadState.FAILED  # Nothing can open any more.
        if self._state is HeadState.FAILED:
            return True
        if self._state is HeadState.OPEN:
            return None
        run, own = self.run, tuple(self._own)
        marker = run.shape.marker.text(self.number)
        run.item(self.number).header = (*self.rules.encode(marker), *own)
        num_read = self._num_read + len(own)
        detail = (*self.rules.encode(run.lead + marker), *own)
        return self.rules.block(
            run,
            self.number,
            detail,
            num_generated=len(own),
            num_read=num_read,
            num_skipped=num_read - run.num_before,
            ends_line=self._reader.ends_line,
        )

    def num_text(self, num_own: int) -> int:
        """Return how many tokens of an ended thread are text."""
        return num_own if self.has_ended else 0

    forced_ids: tuple[int, ...] = ()

    def ends(self, own: Sequence[int], *, refused: bool = False) -> None:
        """Note that the thread has ended."""
        self.run.item(self.number).failed = not self.has_ended


class RootThread:
    """Reads what the root thread of a request generates, in all its engine requests."""

    def __init__(self, rules: ListRules, prompt: Sequence[int]) -> None:
        self.rules = rules
        # Tokens since the last join.
        self._num_read = 0
        self._finder = ListFinder(in_thought=rules.opens_thought(prompt))
        self.run: ListRun | None = None
        self._next_line: NextLineReader | None = None
        self._probed: list[str] = []

    @property
    def is_probing(self) -> bool:
        """Whether its tokens since the last join may be dropped."""
        return self.run is not None

    def read(self, token_id: int, *, stopped: bool) -> ListMark | None:
        """Read a token; return what it shows."""
        self._num_read += 1
        piece = self.rules.text_of(token_id)
        if self.run is None:
            return self._find(piece, stopped=stopped)
        if self._next_line is None:
            if self.run.is_declined:
                self.run = None
                self._finder.decline()
                return self._find(piece, stopped=stopped)
            if self.run.item(self.run.number).failed:
                # The root writes the item itself, after the marker that it has written.
                self._num_read = len(self._probed) + 1
                self._leave_list()
                return self._find(piece, stopped=stopped)
            self._begin_probe(self.run)
        self._probed.append(piece)
        assert self._next_line is not None
        state = self._next_line.feed(piece)
        if state is NextLine.OPEN:
            return None
        run = self.run
        if state is NextLine.ITEM and stopped:
            return None
        if state is NextLine.ITEM:
            run.number += 1
            self._next_line = None
            return NextItem(run)
        self._leave_list()
        return ListEnd(run.number)

    def _begin_probe(self, run: ListRun) -> None:
        """Begin to read what the root writes after an item."""
        begins_line = len(run.item(run.number).closing) < len(run.shape.separator)
        self._next_line = NextLineReader(run.shape, run.number + 1, begins_line=begins_line)
        self._probed, self._num_read = [], 1

    def _find(self, piece: str, *, stopped: bool) -> ListBlock | None:
        found = self._finder.feed(piece)
        if found is None or stopped:
            return None
        number = found.number
        run = self.run = ListRun(found.shape, found.num_before, found.lead, number, number)
        self._probed = []
        return self.rules.block(
            run,
            number,
            (),
            num_generated=self._num_read,
            num_read=self._num_read,
            num_skipped=0,
            ends_line=found.ends_line,
        )

    def _leave_list(self) -> None:
        """Go on as after any other text."""
        self._finder, self.run, self._next_line = ListFinder(), None, None
        for piece in self._probed:
            self._finder.feed(piece)

    def num_text(self, num_own: int) -> int:
        """Return how many tokens of an ended thread are text."""
        return num_own

    forced_ids: tuple[int, ...] = ()

    def ends(self, own: Sequence[int], *, refused: bool = False) -> None:
        """Note that the thread has ended."""


ListReader = RootThread | HeadThread | DetailThread


class ListRules:
    """Rules of the format `lists` with the tokens of one checkpoint."""

    marker_ids = _EveryToken()

    def __init__(self, definition: ParallelFormat, tokenizer: Tokenizer) -> None:
        assert definition.items is not None
        self.definition = definition
        self.items: ListItems = definition.items
        # The text ends at `max_tokens` in reading order. What goes beyond are items after the end
        # of a list, of which there are few at a time.
        self.work_factor = 2 + self.items.ahead
        self._tokenizer = tokenizer
        self.text_of = token_texts(tokenizer)

    @lru_cache(maxsize=4096)  # noqa: B019
    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text after other text, or what the tokenizer has closest to it."""
        try:
            return encode_behind(text, self._tokenizer)
        except CheckpointError:  # A marker may have any word of the model.
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def root_reader(self, prompt: Sequence[int]) -> RootThread:
        """Return a reader of what a request's root thread generates."""
        return RootThread(self, prompt)

    def child_readers(self, block: ListBlock) -> tuple[ListReader, ListReader]:
        """Return readers of what the children of a block generate."""
        run, number = block.run, block.number
        num_read = block.num_read + len(block.children[1].seed)
        return (
            DetailThread(self, run, number, begins_line=block.ends_line),
            HeadThread(self, run, number + 1, num_read),
        )

    def block(
        self,
        run: ListRun,
        number: int,
        detail_seed: tuple[int, ...],
        *,
        num_generated: int,
        num_read: int,
        num_skipped: int,
        ends_line: bool,
    ) -> ListBlock:
        """Return the block that opens after an item's head."""
        marker = run.shape.marker.text(number + 1)
        head = BlockChild(self.encode(run.shape.separator + marker), ())
        children = (BlockChild(detail_seed, ()), head)
        return ListBlock((), children, num_generated, run, number, num_read, num_skipped, ends_line)

    def is_ahead(self, reader: Any) -> bool:
        """Return whether a head must not be written yet: the root is too far behind."""
        return (
            isinstance(reader, HeadThread) and reader.number - reader.run.number > self.items.ahead
        )

    def item_tokens(self, run: ListRun, number: int) -> tuple[int, ...]:
        """Return the tokens of an item after those of the items before it."""
        item = run.item(number)
        return (*self.separator_ids(run, number), *item.header, *(item.text or ()))

    def separator_ids(self, run: ListRun, number: int) -> tuple[int, ...]:
        """Return the tokens between an item and the one before it; none before the second."""
        return () if number == run.first_number else self.encode(run.item(number - 1).closing)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends within the thought of a reasoning model."""
        text = str(self._tokenizer.decode(list(prompt[-_THOUGHT_TOKENS:])))
        return begins_thought_at_end(text)
