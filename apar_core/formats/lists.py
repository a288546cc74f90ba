"""Threads of an ordinary list: its items' details are written in parallel, without trained tokens.

A thread that has ended the head of a list's second item waits for two children: the *detail* of
that item, and the *head* of the next one. A head thread that has ended its head does the same, and
so on. In reading order this is the list. Every detail but the second reads only the first item and
its own head (`ListRun.num_before`): after a row of bare heads a model writes bare heads.

How far the list goes is the model's decision: a detail that does not go on with another item ends
the list, and the threads of later items are cancelled. Unless that detail has ended the answer, the
waiting thread then continues after the joined text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from apar_core.formats.blocks import BlockChild, JoinedText, OpenBlock
from apar_core.formats.control_tokens import Tokenizer
from apar_core.formats.list_shape import (
    DetailEnd,
    DetailReader,
    HeadReader,
    HeadState,
    ListFinder,
    ListShape,
)
from apar_core.formats.parallel_format import ListItems, ParallelFormat
from apar_core.formats.resolved_format import encode_behind

_CONTEXT = "a"
_THOUGHT_TOKENS = 16


class _EveryToken:
    """Container of all tokens: each is read."""

    def __contains__(self, token_id: object) -> bool:
        return True


@dataclass(slots=True)
class ListRun:
    """What the threads of one list have in common, in one process.

    num_before: tokens between the last join of the thread that found the list and its second item.
    lead: text before an item's marker that is not among them.
    last_number: the first item after which the list has ended, if one is known; ends_answer: its
        detail has ended the answer, too.
    undecided: numbers of the items whose details are being written.
    """

    shape: ListShape
    num_before: int
    lead: str
    last_number: int | None = None
    ends_answer: bool = False
    undecided: set[int] = field(default_factory=set)

    def ends_at(self, number: int, *, ends_answer: bool) -> None:
        """Note that the list does not go on after an item."""
        if self.last_number is None or number <= self.last_number:
            self.last_number, self.ends_answer = number, ends_answer


@dataclass(frozen=True, slots=True)
class ListBlock(OpenBlock):
    """The detail of an item and the head of the next.

    num_read: tokens between the last join of the thread that found the list and the end of the
        item's head, on the path of the thread that has opened the block.
    """

    run: ListRun
    number: int
    num_read: int


class DetailThread:
    """Reads what the thread of an item's detail generates."""

    def __init__(self, rules: ListRules, run: ListRun, number: int) -> None:
        self._rules, self._run, self.number = rules, run, number
        self._reader = DetailReader(run.shape)
        self._end: DetailEnd | None = None
        self._is_over = False
        run.undecided.add(number)

    @property
    def num_certain(self) -> int:
        """How many of its tokens certainly stay in the text."""
        return self._reader.num_kept

    @property
    def ends_list(self) -> bool:
        """Whether the list ends with this item; known once the thread has ended."""
        return self._is_over and self._end is not DetailEnd.ITEM

    def read(self, token_id: int, generated: Callable[[], Sequence[int]]) -> bool:
        """Read a token; return whether the detail ends before it."""
        self._end = self._reader.feed(self._rules.text_of(token_id))
        return self._end is not None

    def ends(self, own: Sequence[int], *, itself: bool) -> tuple[int, ...]:
        """Note that the thread has ended; return its text with what stands before the next item.

        `own` are its tokens without an end token of the model, with which it ended if `itself`.
        """
        self._is_over = True
        self._run.undecided.discard(self.number)
        if self.ends_list:
            self._run.ends_at(self.number, ends_answer=itself and self._end is None)
        return (*own[: self.num_text(len(own))], *self.closing_ids)

    def num_text(self, num_own: int) -> int:
        """Return how many tokens of an ended thread are text."""
        return num_own if self._end is None else min(num_own, self._reader.num_kept)

    @property
    def closing_ids(self) -> tuple[int, ...]:
        """Tokens after its own in the text, once it has ended."""
        if self._end is None:
            return ()
        return self._rules.encode(self._reader.closing(self._end))


class HeadThread:
    """Reads what the thread of an item's head generates, after the item's marker."""

    def __init__(self, rules: ListRules, run: ListRun, number: int, num_read: int) -> None:
        self._rules, self._run, self.number = rules, run, number
        self._num_read = num_read
        self._reader = HeadReader(run.shape.marker, run.shape.head_end)
        self._own: list[int] = []
        self._state = HeadState.OPEN

    @property
    def num_undecided(self) -> int:
        """How many details of the list are being written."""
        return len(self._run.undecided)

    @property
    def num_certain(self) -> int:
        """How many of its tokens certainly stay in the text."""
        return len(self._own) if self._state is HeadState.ENDED else 0

    ends_list = False

    def read(
        self, token_id: int, generated: Callable[[], Sequence[int]]
    ) -> ListBlock | bool | None:
        """Read a token; return the block that opens after it, or True if the head has failed."""
        self._own.append(token_id)
        self._state = self._reader.feed(self._rules.text_of(token_id))
        if self._state is HeadState.FAILED:
            return True
        if self._state is HeadState.OPEN:
            return None
        run, own = self._run, tuple(self._own)
        marker = run.lead + run.shape.marker.text(self.number)
        num_read = self._num_read + len(own)
        detail = BlockChild(
            (*self._rules.encode(marker), *own), (), num_skipped=num_read - run.num_before
        )
        return self._rules.block(run, self.number, detail, len(own), num_read)

    def ends(self, own: Sequence[int], *, itself: bool) -> tuple[int, ...] | None:
        """Note that the thread has ended; None, as a head that opens no block is no text."""
        return None

    def num_text(self, num_own: int) -> int:
        """Return how many tokens of a thread that ends without a block are text."""
        return 0

    closing_ids: tuple[int, ...] = ()


class RootThread:
    """Reads what the root thread of a request generates since its last join."""

    def __init__(self, rules: ListRules, prompt: Sequence[int]) -> None:
        self._rules, self._prompt = rules, prompt
        self._num_read = 0
        self._finder = ListFinder(in_thought=rules.opens_thought(prompt))

    num_certain: int | None = None
    ends_list = False

    def read(self, token_id: int, generated: Callable[[], Sequence[int]]) -> ListBlock | None:
        """Read a token; return the block that opens after it."""
        self._num_read += 1
        found = self._finder.feed(self._rules.text_of(token_id))
        if found is None:
            return None
        run = ListRun(found.shape, found.num_before, found.lead)
        num_read = self._num_read
        # The next tokens are those of the continuation.
        self._num_read, self._finder = 0, ListFinder()
        return self._rules.block(run, found.number, BlockChild((), ()), num_read, num_read)

    def ends(self, own: Sequence[int], *, itself: bool) -> tuple[int, ...]:
        """Note that the thread has ended; return its text."""
        return tuple(own)

    def num_text(self, num_own: int) -> int:
        """Return how many tokens of an ended thread are text."""
        return num_own

    closing_ids: tuple[int, ...] = ()


class ListRules:
    """Rules of the format `lists` with the tokens of one checkpoint.

    The attributes are those of `BlockRules`: every token may open a block or end a child.
    """

    cancels = True
    # How many times its `max_tokens` a request may generate. The text ends at `max_tokens` in reading
    # order; what goes beyond are tokens of items after the end of a list.
    work_factor = 2
    marker_ids = _EveryToken()
    shows_children = True
    nests = True
    suffix_ids: tuple[int, ...] = ()

    def __init__(self, definition: ParallelFormat, tokenizer: Tokenizer) -> None:
        assert definition.items is not None
        self.definition = definition
        self.items: ListItems = definition.items
        self._tokenizer = tokenizer
        context = tokenizer.encode(_CONTEXT, add_special_tokens=False)
        before = str(tokenizer.decode(context))

        @cache
        def text_of(token_id: int) -> str:
            # After a letter, so that a leading space of the token is not stripped.
            return str(tokenizer.decode([*context, token_id]))[len(before) :]

        self.text_of = text_of
        self.encode = cache(lambda text: encode_behind(text, tokenizer) if text else ())

    def root_reader(self, prompt: Sequence[int]) -> RootThread:
        """Return a reader of what a request's root thread generates."""
        return RootThread(self, prompt)

    def child_readers(self, block: Any, prompt: Sequence[int]) -> tuple[DetailThread, HeadThread]:
        """Return readers of what the children of a block generate."""
        run, number = block.run, block.number
        num_read = block.num_read + len(block.children[1].seed)
        return DetailThread(self, run, number), HeadThread(self, run, number + 1, num_read)

    def block(
        self, run: ListRun, number: int, detail: BlockChild, num_generated: int, num_read: int
    ) -> ListBlock:
        """Return the block that opens after an item's head."""
        marker = run.shape.marker.text(number + 1)
        head = BlockChild(self.encode(run.shape.separator + marker), self.encode(marker))
        return ListBlock((), (detail, head), num_generated, run, number, num_read)

    def is_ahead_of(self, reader: Any) -> bool:
        """Return whether a thread must not begin yet: too many details are being written."""
        return isinstance(reader, HeadThread) and reader.num_undecided >= self.items.ahead

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends within the thought of a reasoning model."""
        text = str(self._tokenizer.decode(list(prompt[-_THOUGHT_TOKENS:])))
        return text.rfind("<think>") > text.rfind("</think>")

    def num_kept(self, generated: Sequence[int]) -> int:
        """Return how many of a parent's tokens since its last join stay before a joined text."""
        return len(generated)

    def joined(
        self,
        block: Any,
        generated: Sequence[int],
        texts: Sequence[Sequence[int] | None],
        *,
        is_root: bool,
    ) -> JoinedText:
        """Return the joined text; a child without a text was cancelled, with its header."""
        token_ids: list[int] = []
        for child, text in zip(block.children, texts, strict=True):
            if text is not None:
                token_ids += (*child.header, *text)
        return JoinedText(len(generated), tuple(token_ids), is_root and not block.run.ends_answer)
