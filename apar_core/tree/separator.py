"""What has to stand between two paragraphs that a checkpoint was trained to leave out.

The released models' training text drops a line break before a detail and an empty line before the
next paragraph in places; a separator puts them back when the tree is read.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Generic, TypeAlias, TypeVar

Item = TypeVar("Item")


class Edge(IntEnum):
    """How reading passed from one paragraph to another; the higher one separates more."""

    FIRST_CHILD = 1
    NEXT_SIBLING = 2


Separator: TypeAlias = Callable[[Item, Item, Edge], Sequence[Item]]
"""Gets the last item before the border, the first one after it, and the edge crossed."""


class Joiner(Generic[Item]):
    """Joins paragraphs in reading order and asks for a separator at each border.

    A border is asked for once, when the first item behind it is known. Where empty paragraphs lie
    between two items, the strongest edge crossed counts: a paragraph that has only a detail still
    begins a new paragraph. Nothing stands before the first item of the whole text.
    """

    def __init__(self, separator: Separator[Item] | None) -> None:
        self._separator = separator
        # Empty until the first item; a list, because None may be an item.
        self._previous: list[Item] = []
        self._crossed: Edge | None = None

    def cross(self, edge: Edge) -> None:
        """Note that reading left a paragraph through this edge."""
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
