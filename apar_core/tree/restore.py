"""The whole tree in reading order."""

from typing import TypeVar

from apar_core.tree.paragraph import ParagraphNode, ParagraphTree
from apar_core.tree.separator import Edge, Joiner, Separator

Item = TypeVar("Item")


def restore(tree: ParagraphTree[Item], separator: Separator[Item] | None = None) -> list[Item]:
    """Every item in the order paragraph, first child, next sibling.

    Works on a growing tree too; `TreeStream` tells which part of it will stay as it is.
    """
    text: list[Item] = []
    joiner = Joiner(separator)
    later: list[ParagraphNode[Item]] = []
    node: ParagraphNode[Item] | None = tree.root
    while node is not None:
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
