"""KV blocks of the threads of a replica: shared at forks, given back early, none copied in full.

A thread owns the blocks from the first one that it shares not with its parent. A block goes back
when the thread that wrote it has ended and no thread below it reads it any more; so in vLLM, whose
reference counts come to the same.
"""

from __future__ import annotations

from typing import Self


class Segment:
    """The own blocks of one thread: indices `first` to `end` in its sequence.

    `held` while the thread needs its place in the tree: running, or waiting with a reference on its
    parent's blocks. `end` is kept up to date only while the thread does not run. A piece of a
    prompt in the prefix cache has no thread, only children.
    """

    __slots__ = ("children", "end", "first", "held", "is_piece", "parent", "running")

    def __init__(
        self, parent: Self | None, first: int, *, held: bool = True, is_piece: bool = False
    ) -> None:
        self.parent = parent
        self.first = first
        self.end = first
        self.held = held
        self.is_piece = is_piece
        self.running = False
        self.children: list[Self] = []
        if parent is not None:
            parent.children.append(self)


class BlockPool:
    """The blocks of one replica; counts them and knows not their contents."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free = blocks
        # Blocks of cached pieces of prompts that threads are reading.
        self.piece_blocks = 0

    def missing(self, segment: Segment, num_blocks: int) -> int:
        """Blocks that a waiting thread lacks for a sequence of `num_blocks`."""
        return num_blocks - max(segment.first, segment.end)

    def take(self, piece: Segment, end: int) -> None:
        """Use the blocks of a piece again, which had been free."""
        piece.end = end
        self.free -= end - piece.first
        self.piece_blocks += end - piece.first

    def start(self, segment: Segment, num_blocks: int) -> None:
        """Give a waiting thread what it lacks; the caller has seen that so many are free."""
        self.free -= self.missing(segment, num_blocks)
        segment.end = num_blocks
        segment.running = True

    def stop(self, segment: Segment, num_blocks: int) -> None:
        """End a running thread, or put it off: what no child reads is free."""
        segment.end = num_blocks
        segment.running = False
        segment.held = False
        self._shrink(segment)

    def let_go(self, segment: Segment) -> None:
        """Take a waiting thread's reference on its parent's blocks, where memory is short."""
        if segment.held and not segment.running:
            segment.held = False
            self._shrink(segment)

    def hold_again(self, segment: Segment) -> None:
        """Take hold of what is left of the blocks of a thread that has lost some."""
        if segment.held:
            return
        segment.held = True
        # With children below, its own first blocks are there, and so is all above.
        if segment.children:
            return
        parent, first = segment.parent, segment.first
        while parent is not None and not (parent.held or parent.children):
            first = min(first, parent.first)
            parent = parent.parent
        if parent is None:
            first = 0
        else:
            if not parent.running:
                first = min(first, parent.end)
            first = max(first, parent.first)
            parent.children.append(segment)
        segment.parent, segment.first, segment.end = parent, first, first

    def _shrink(self, segment: Segment) -> None:
        while not segment.held:
            kept = segment.first
            if segment.is_piece:
                # Whole while anybody reads it.
                if segment.children:
                    return
                self.piece_blocks -= segment.end - kept
            for child in segment.children:
                kept = max(kept, child.first)
            self.free += segment.end - kept
            segment.end = kept
            parent = segment.parent
            if segment.children or parent is None:
                return
            parent.children.remove(segment)
            segment = parent
