"""Paragraph tree of one request, which grows with the outputs of its threads.

Source: APAR (arXiv 2401.06761), section 2.2 and algorithm 1. An item is a token id, or a token with
its log-probabilities. Control tokens are not items; the thread records count them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, TypeVar

from apar_core.errors import TreeError
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ThreadBlock:
    """Children for which a thread waits, in formats whose parent waits.

    first_child, num_children: which of the thread's children, by ordinal.
    num_generated: items that the thread has generated before, those of earlier blocks included.
    """

    first_child: int
    num_children: int
    num_generated: int


# Equality stays identity: comparing linked nodes would recurse through the tree.
@dataclass(slots=True, eq=False)
class ParagraphNode(Generic[Item]):
    """A paragraph: the items of one thread between two of its forks.

    `lead` are items of the text before them that no thread has generated.

    `held`: whether it may still be discarded, so that nothing from it on is certain.

    A closed node gets no more items. It has both links if its thread forked at its end, neither if
    its thread finished there.
    """

    items: list[Item] = field(default_factory=list)
    lead: Sequence[Item] = ()
    first_child: ParagraphNode[Item] | None = field(default=None, repr=False)
    next_sibling: ParagraphNode[Item] | None = field(default=None, repr=False)
    closed: bool = False
    held: bool = False


@dataclass(slots=True, eq=False)
class ThreadRecord(Generic[Item]):
    """State of one thread.

    first_node: its first paragraph.
    fork_index: tokens (text and fork tokens) that the parent had generated before this thread's
        fork token.
    is_apart: whether its text has no place in the tree, until its parent joins it. joins_later:
        whether its own children have none when they begin.
    ended: whether a finished thread ended itself with its end-of-thread token.
    discarded: whether what it wrote was removed from the text.
    has_fork_tokens: whether it generated a token for each of its forks. pauses: whether it waits
        now, of a thread without such tokens.
    num_forced: items that were not generated: those of the format around the texts of children.
    num_seed, num_header, num_closing: of a child for which its parent waits, the tokens forced
        at its start, and the items before and after its text. is_closed: whether its text ends
        with a marker of its format.
    blocks: what the thread has waited for. suffixes: how many items of the format's own it has
        continued after, for each join.
    """

    current_node: ParagraphNode[Item] = field(repr=False)
    parent: ThreadId | None
    depth: int
    fork_index: int
    num_items: int = 0
    children: list[ThreadId] = field(default_factory=list)
    finished: bool = False
    ended: bool = False
    discarded: bool = False
    has_fork_tokens: bool = True
    pauses: bool = False
    num_forced: int = 0
    is_apart: bool = False
    joins_later: bool = False
    num_seed: int = 0
    num_header: int = 0
    num_closing: int = 0
    is_closed: bool = False
    blocks: list[ThreadBlock] = field(default_factory=list)
    suffixes: list[int] = field(default_factory=list)
    first_node: ParagraphNode[Item] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.first_node = self.current_node

    @property
    def num_generated_items(self) -> int:
        """Items that the thread has generated."""
        return self.num_items - self.num_forced

    @property
    def num_generated(self) -> int:
        """Tokens that the thread has generated: items, fork tokens and its end token."""
        num_forks = 0 if self.blocks or not self.has_fork_tokens else len(self.children)
        return self.num_generated_items + num_forks + self.ended

    @property
    def waits(self) -> bool:
        """Whether the thread waits until its children have ended."""
        return (self.pauses or len(self.suffixes) < len(self.blocks)) and not self.finished


class ParagraphTree(Generic[Item]):
    """All paragraphs and threads of one request; threads may be interleaved in any order.

    seed_tokens: tokens forced at the start of each child. cut_tokens: 1 if a child does not read
    its parent's fork token, else 0.
    discarded_tokens: items that threads have generated and that are no part of the text.
    """

    def __init__(self, *, seed_tokens: int = 1, cut_tokens: int = 0) -> None:
        self.seed_tokens = seed_tokens
        self.cut_tokens = cut_tokens
        self.root: ParagraphNode[Item] = ParagraphNode()
        self._threads: dict[ThreadId, ThreadRecord[Item]] = {
            ROOT_THREAD: ThreadRecord(self.root, parent=None, depth=0, fork_index=0)
        }
        self._num_live = 1
        self.discarded_tokens = 0

    @property
    def threads(self) -> Mapping[ThreadId, ThreadRecord[Item]]:
        """All threads, live and finished, parents before their children."""
        return MappingProxyType(self._threads)

    @property
    def finished(self) -> bool:
        """Whether every thread has finished, so that nothing more can be added."""
        return self._num_live == 0

    def append(self, thread: ThreadId, items: Iterable[Item]) -> None:
        """Add items to a thread's current paragraph."""
        record = self._live_record(thread, "append to")
        node_items = record.current_node.items
        num_before = len(node_items)
        node_items.extend(items)
        record.num_items += len(node_items) - num_before

    def open_block(
        self,
        parent: ThreadId,
        children: Sequence[ThreadId],
        seeds: Sequence[int],
        headers: Sequence[Sequence[Item]],
    ) -> None:
        """Let a thread wait for children, given the sizes of their seeds and their headers.

        The paragraphs between the children are empty. The parent's next items come after them.
        """
        record = self._live_record(parent, "open a block of")
        record.blocks.append(
            ThreadBlock(len(record.children), len(children), record.num_generated_items)
        )
        for child, num_seed, header in zip(children, seeds, headers, strict=True):
            self.fork(parent, child, lead=header)
            self._threads[child].num_seed = num_seed
            self._threads[child].num_header = len(header)

    def fork_apart(
        self, parent: ThreadId, child: ThreadId, num_seed: int, header: Sequence[Item]
    ) -> None:
        """Begin a child whose text has no place until its parent joins it: `attach`.

        Arguments are as in `open_block`.
        """
        record = self._live_record(parent, "fork")
        record.has_fork_tokens, record.joins_later = False, True
        self._threads[child] = ThreadRecord(
            ParagraphNode(lead=header),
            parent=parent,
            depth=record.depth + 1,
            fork_index=record.num_generated_items,
            is_apart=True,
            num_seed=num_seed,
            num_header=len(header),
        )
        record.children.append(child)
        self._num_live += 1

    def attach(self, parent: ThreadId, ordinal: int) -> None:
        """Let a thread wait for a child that it has forked before; its text comes next."""
        record = self._live_record(parent, "join")
        child = self._threads[record.children[ordinal]]
        child.is_apart = False
        node = record.current_node
        node.first_child, node.next_sibling = child.first_node, ParagraphNode()
        node.closed = True
        record.current_node = node.next_sibling
        record.blocks.append(ThreadBlock(ordinal, 1, record.num_generated_items))

    def close_child(self, child: ThreadId, items: Sequence[Item], *, is_closed: bool) -> None:
        """Add the items after the text of a child for which its parent waits."""
        self.force(child, items)
        self._threads[child].num_closing = len(items)
        self._threads[child].is_closed = is_closed

    def join(self, parent: ThreadId, items: Sequence[Item]) -> None:
        """Let a parent continue after its children and these items."""
        self.force(parent, items)
        self._threads[parent].suffixes.append(len(items))

    def fork(self, parent: ThreadId, child: ThreadId, lead: Sequence[Item] = ()) -> None:
        """Close the parent's paragraph; the child writes its detail, the parent its next sibling.

        `lead` are items of the text before the detail.
        Raises TreeError if the parent is unknown or finished, or if the child exists already.
        """
        record = self._live_record(parent, "fork")
        if child in self._threads:
            raise TreeError(
                f"thread {parent!r} cannot fork {child!r}: it is already one of "
                f"{len(self._threads)} threads"
            )
        node = record.current_node
        node.first_child = ParagraphNode(lead=lead)
        node.next_sibling = ParagraphNode()
        node.closed = True
        self._threads[child] = ThreadRecord(
            node.first_child,
            parent=parent,
            depth=record.depth + 1,
            fork_index=record.num_items + len(record.children),
        )
        record.current_node = node.next_sibling
        record.children.append(child)
        self._num_live += 1

    def finish(self, thread: ThreadId, *, ended: bool = True) -> None:
        """Close a thread.

        `ended` is False if a limit, a stop string or an abort cut the thread off, so that it
        generated no end-of-thread token.
        """
        record = self._live_record(thread, "finish")
        record.current_node.closed = True
        record.finished = True
        record.ended = ended
        self._num_live -= 1

    def discard(self, thread: ThreadId) -> dict[ThreadId, bool]:
        """Remove the text of a thread and of all threads below it, which end where they are.

        Threads and paragraphs remain, empty. Returns whether each was live, of those that had text.
        """
        names = [thread]
        for name in names:
            names += self._threads[name].children
        found: dict[ThreadId, bool] = {}
        for name in names:
            record = self._threads[name]
            if record.discarded:
                continue
            found[name] = not record.finished
            self.discarded_tokens += record.num_generated_items
            node: ParagraphNode[Item] | None = record.first_node
            while node is not None:
                node.items, node.lead, node.closed, node.held = [], (), True, False
                node = node.next_sibling
            self._num_live -= found[name]
            record.finished = record.discarded = True
            record.ended = False
            record.num_items = record.num_forced = record.num_header = 0
        return found

    def force(self, thread: ThreadId, items: Sequence[Item]) -> None:
        """Add items to a thread that it has not generated."""
        self.append(thread, items)
        self._threads[thread].num_forced += len(items)

    def _live_record(self, thread: ThreadId, action: str) -> ThreadRecord[Item]:
        record = self._threads.get(thread)
        if record is None:
            raise TreeError(
                f"cannot {action} thread {thread!r}: unknown among {len(self._threads)} threads"
            )
        if record.finished:
            raise TreeError(
                f"cannot {action} thread {thread!r}: it finished after {record.num_items} items "
                f"and {len(record.children)} forks"
            )
        return record
