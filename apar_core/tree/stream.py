"""The part of a growing tree whose place in the restored text is already certain."""

from typing import Generic, TypeVar

from apar_core.tree.paragraph import ParagraphNode, ParagraphTree
from apar_core.tree.separator import Edge, Joiner, Separator

Item = TypeVar("Item")


class TreeStream(Generic[Item]):
    """Reads a tree once, in the order of `restore`, as far as it is certain.

    An item is certain when every paragraph before its own is closed, so that nothing can come in
    between. The cursor never goes back: all calls together cost time linear in items and threads.
    """

    def __init__(self, tree: ParagraphTree[Item], separator: Separator[Item] | None = None) -> None:
        self._node: ParagraphNode[Item] = tree.root
        self._num_taken = 0
        # Next siblings of the paragraphs above the cursor, to be read when their turn comes.
        self._later: list[ParagraphNode[Item]] = []
        self._joiner = Joiner(separator)

    def take(self) -> list[Item]:
        """The items that became certain since the last call, separators included."""
        text: list[Item] = []
        self._take_from_node(text)
        while self._node.closed and self._advance():
            self._take_from_node(text)
        return text

    def _take_from_node(self, text: list[Item]) -> None:
        items = self._node.items
        self._joiner.join(text, items[self._num_taken :])
        self._num_taken = len(items)

    def _advance(self) -> bool:
        """Move the cursor on from a closed paragraph; false at the end of the text."""
        node = self._node
        if node.first_child is not None and node.next_sibling is not None:
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
