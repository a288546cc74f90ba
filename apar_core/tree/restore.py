"""Read a paragraph tree as one text: all of it, or the part that is already certain.

The reading order is paragraph, first child, next sibling.
"""

from collections.abc import Callable, MutableSequence, Sequence
from enum import IntEnum
from typing import Generic, TypeAlias, TypeVar

from apar_core.tree.paragraph import ParagraphNode, ParagraphTree

Item = TypeVar("Item")


class Edge(IntEnum):
    """Link crossed between two paragraphs; a higher value separates them more."""

    FIRST_CHILD = 1
    NEXT_SIBLING = 2


Separator: TypeAlias = Callable[[Item, Item, Edge], Sequence[Item]]
"""Items to insert between the last item before a border and the first one after it.

The training text of the released checkpoints lacks some line breaks before details and paragraphs.
A separator restores them.
"""


def restore(tree: ParagraphTree[Item], separator: Separator[Item] | None = None) -> list[Item]:
    """Return every item in reading order.

    Also works on a growing tree; `TreeStream` returns only the part that will not change.
    """
    text: list[Item] = []
    joiner = _Joiner(separator)
    later: list[ParagraphNode[Item]] = []
    node: ParagraphNode[Item] | None = tree.root
    while node is not None:
        joiner.join(text, node.lead)
        joiner.join(text, node.items)
        if node.next_sibling is not None:
            later.append(node.next_sibling)
        if node.first_child is not None:
            joiner.cross(Edge.FIRST_CHILD)
            node = node.first_child
        elif later:
            joiner.cross(Edge.NEXT_SIBLING)
            node = later.pop()
        else:
            node = None
    return text


class TreeStream(Generic[Item]):
    """Cursor that reads a growing tree once, in reading order, as far as it is certain.

    An item is certain when every paragraph before its own is closed, so that nothing can be
    inserted before it. The cursor never goes back: all calls together take time linear in items
    and threads. `pieces`, if set, gets each paragraph with the number of items taken from it,
    separators before them included.
    """

    pieces: MutableSequence[tuple[ParagraphNode[Item], int]] | None = None

    def __init__(self, tree: ParagraphTree[Item], separator: Separator[Item] | None = None) -> None:
        self._node: ParagraphNode[Item] = tree.root
        self._num_taken = 0
        # Next siblings of the paragraphs above the cursor, innermost last.
        self._later: list[ParagraphNode[Item]] = []
        self._joiner = _Joiner(separator)

    def take(self) -> list[Item]:
        """Return the items that became certain since the last call, separators included."""
        text: list[Item] = []
        self._take_from_node(text)
        while self._node.closed and self._advance():
            self._take_from_node(text, self._node.lead)
        return text

    def _take_from_node(self, text: list[Item], lead: Sequence[Item] = ()) -> None:
        items = self._node.items
        num_before = len(text)
        self._joiner.join(text, lead)
        self._joiner.join(text, items[self._num_taken :])
        self._num_taken = len(items)
        if self.pieces is not None and len(text) > num_before:
            self.pieces.append((self._node, len(text) - num_before))

    def _advance(self) -> bool:
        """Move the cursor past a closed paragraph; return False at the end of the certain text."""
        node = self._node
        if node.first_child is not None and node.next_sibling is not None:
            if node.first_child.held:
                return False
            self._later.append(node.next_sibling)
            self._joiner.cross(Edge.FIRST_CHILD)
            self._node = node.first_child
        elif self._later:
            self._joiner.cross(Edge.NEXT_SIBLING)
            self._node = self._later.pop()
        else:
            return False
        self._num_taken = 0
        return True


class _Joiner(Generic[Item]):
    """Joins paragraphs in reading order and asks for a separator once per border.

    Empty paragraphs have no border of their own: the strongest edge crossed since the last item
    counts. Nothing is inserted before the first item of the text.
    """

    def __init__(self, separator: Separator[Item] | None) -> None:
        self._separator = separator
        # Empty until the first item; a list, because None may be an item.
        self._previous: list[Item] = []
        self._crossed: Edge | None = None

    def cross(self, edge: Edge) -> None:
        self._crossed = edge if self._crossed is None else max(self._crossed, edge)

    def join(self, text: list[Item], items: Sequence[Item]) -> None:
        """Append the items of a paragraph, or a part of them, to the text."""
        if not items:
            return
        if self._separator is not None:
            if self._crossed is not None and self._previous:
                text.extend(self._separator(self._previous[0], items[0], self._crossed))
            self._previous = [items[-1]]
        self._crossed = None
        text.extend(items)
