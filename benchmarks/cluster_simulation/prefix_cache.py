"""Beginnings of prompts that a simulated replica has computed: shared while used, kept while free.

As in vLLM: requests that run with the same beginning share its full blocks; blocks that nobody uses
are free, and hold what they hold until they are given to others, those used longest ago first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from benchmarks.cluster_simulation.blocks import BlockPool, Segment

Pieces = Sequence[tuple[int, int]]
"""(hash of the prompt up to a piece's end, tokens up to there), from the first piece on."""


class PrefixCache:
    """Pieces of prompts as segments of a block pool, above the root threads that read them."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        # Segment and the end of its blocks; a segment without children has given them back.
        self._pieces: OrderedDict[int, tuple[Segment, int]] = OrderedDict()
        self._blocks = 0

    def hit_blocks(self, pieces: Pieces) -> tuple[int, int]:
        """Blocks at a prompt's beginning that are there, and how many of them are in use."""
        self.forget_overwritten()
        hit = used = 0
        for segment, end in self._known(pieces):
            hit = end
            if segment.children:
                used = end
        return hit, used

    def attach(self, root: Segment, pieces: Pieces) -> None:
        """Put a root thread that starts, or starts again, below what is there of its prompt."""
        parent: Segment | None = None
        first = 0
        for segment, end in self._known(pieces):
            if not segment.children:
                self._pool.take(segment, end)
                if parent is not None:
                    parent.children.append(segment)
            parent, first = segment, end
        if parent is not None:
            parent.children.append(root)
        root.parent, root.first, root.end = parent, first, first
        self._used(pieces)

    def add(self, root: Segment, pieces: Pieces) -> None:
        """Make the prompt that a running root thread has computed known; its blocks stay."""
        parent = root.parent
        for piece, covered in pieces:
            end = covered // self._block_size
            if end <= root.first:
                continue
            if piece in self._pieces:
                # Computed by two at once: the second keeps its own.
                break
            segment = Segment(parent, root.first, held=False, is_piece=True)
            segment.end = end
            self._pool.piece_blocks += end - root.first
            self._blocks += end - root.first
            self._pieces[piece] = (segment, end)
            if parent is not None:
                parent.children.remove(root)
            segment.children.append(root)
            root.parent, root.first = segment, end
            parent = segment
        self._used(pieces)

    def _known(self, pieces: Pieces) -> list[tuple[Segment, int]]:
        """The leading pieces that are there; one whose predecessor has gone is of no use."""
        known: list[tuple[Segment, int]] = []
        parent: Segment | None = None
        for piece, _ in pieces:
            found = self._pieces.get(piece)
            if found is None or found[0].parent is not parent:
                break
            known.append(found)
            parent = found[0]
        return known

    def _used(self, pieces: Pieces) -> None:
        # The last pieces go first: without those before them they are worth nothing.
        for piece, _ in reversed(pieces):
            if piece in self._pieces:
                self._pieces.move_to_end(piece)

    def forget_overwritten(self) -> None:
        """Drop what free blocks held that others have been given since."""
        pool = self._pool
        while self._blocks - pool.piece_blocks > pool.free:
            piece, (segment, end) = self._pieces.popitem(last=False)
            if segment.children:
                # In use, and so used last.
                self._pieces[piece] = (segment, end)
            else:
                self._blocks -= end - segment.first
