from hypothesis import given

from apar_core.tree import ROOT_THREAD, Edge, ParagraphTree, ThreadId, restore
from tests.unit.apar_core.tree.scripts import Event, apply, flat_segments, interleavings


def test_reading_order_is_paragraph_then_child_then_sibling() -> None:
    tree: ParagraphTree[str] = ParagraphTree()
    first, second, nested = ThreadId("first"), ThreadId("second"), ThreadId("nested")
    tree.append(ROOT_THREAD, "A")
    tree.fork(ROOT_THREAD, first)
    tree.append(ROOT_THREAD, "B")
    tree.fork(ROOT_THREAD, second)
    tree.append(ROOT_THREAD, "C")
    tree.append(second, "b")
    tree.append(first, "a")
    tree.fork(first, nested)
    tree.append(nested, "x")
    tree.append(first, "y")

    assert "".join(restore(tree)) == "AaxyBbC"


@given(interleavings())
def test_restored_text_equals_the_naive_flat_order(events: list[Event]) -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    for event in events:
        apply(tree, event)

    assert restore(tree) == [item for items, _ in flat_segments(events) for item in items]


def test_order_of_thread_outputs_does_not_matter() -> None:
    def grow(order: list[str]) -> list[str]:
        tree: ParagraphTree[str] = ParagraphTree()
        child = ThreadId("child")
        tree.append(ROOT_THREAD, "1")
        tree.fork(ROOT_THREAD, child)
        for name in order:
            tree.append(child if name == "d" else ROOT_THREAD, name)
        return restore(tree)

    assert grow(["d", "d", "2", "2"]) == grow(["2", "d", "2", "d"]) == ["1", "d", "d", "2", "2"]


def test_a_hundred_thousand_levels_restore_without_recursion() -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    thread = ROOT_THREAD
    depth = 100_000
    for level in range(depth):
        tree.append(thread, [level])
        child = ThreadId(str(level))
        tree.fork(thread, child)
        tree.append(thread, [-level])
        tree.finish(thread)
        thread = child
    tree.finish(thread)

    assert restore(tree) == [*range(depth), *range(-depth + 1, 1)]


def test_separators_get_both_neighbours_and_the_edge_between_them() -> None:
    seen: list[tuple[str, str, Edge]] = []

    def separator(previous: str, following: str, edge: Edge) -> str:
        seen.append((previous, following, edge))
        return "/" if edge is Edge.FIRST_CHILD else "|"

    tree: ParagraphTree[str] = ParagraphTree()
    child = ThreadId("child")
    tree.append(ROOT_THREAD, "ab")
    tree.fork(ROOT_THREAD, child)
    tree.append(ROOT_THREAD, "ef")
    tree.append(child, "cd")

    assert "".join(restore(tree, separator)) == "ab/cd|ef"
    assert seen == [("b", "c", Edge.FIRST_CHILD), ("d", "e", Edge.NEXT_SIBLING)]


def test_empty_paragraphs_between_two_items_give_one_separator_of_the_strongest_edge() -> None:
    edges: list[Edge] = []

    def separator(previous: str, following: str, edge: Edge) -> str:
        edges.append(edge)
        return ""

    first, second, nested = ThreadId("first"), ThreadId("second"), ThreadId("nested")
    tree: ParagraphTree[str] = ParagraphTree()
    tree.append(ROOT_THREAD, "A")
    tree.fork(ROOT_THREAD, first)
    tree.fork(ROOT_THREAD, second)  # the root's paragraph between the two forks is empty
    tree.fork(first, nested)  # so is the first one of `first`
    tree.append(nested, "x")
    tree.append(second, "B")

    assert "".join(restore(tree, separator)) == "AxB"
    # A to x crosses into `first` and `nested`; x to B goes on in `first`, the root and `second`.
    assert edges == [Edge.FIRST_CHILD, Edge.NEXT_SIBLING]


def test_no_separator_opens_or_closes_the_text() -> None:
    tree: ParagraphTree[str] = ParagraphTree()
    child = ThreadId("child")
    tree.fork(ROOT_THREAD, child)
    tree.append(child, "a")

    assert restore(tree, lambda *_: "|") == ["a"]
