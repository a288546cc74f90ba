from hypothesis import given

from apar_core.tree import ROOT_THREAD, Edge, ParagraphTree, ThreadId, TreeStream, restore
from tests.unit.apar_core.tree.scripts import Event, apply, flat_segments, interleavings


def certain_prefix(events: list[Event]) -> list[int]:
    """Naive definition: everything up to the first paragraph that may still grow."""
    text: list[int] = []
    for items, closed in flat_segments(events):
        text.extend(items)
        if not closed:
            break
    return text


@given(interleavings())
def test_at_every_moment_exactly_the_certain_prefix_has_been_taken(events: list[Event]) -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    stream = TreeStream(tree)
    taken: list[int] = stream.take()
    for count, event in enumerate(events, start=1):
        apply(tree, event)
        taken += stream.take()
        assert taken == certain_prefix(events[:count])

    assert tree.finished
    assert taken == restore(tree)
    assert stream.take() == []


@given(interleavings())
def test_streamed_separators_equal_restored_ones(events: list[Event]) -> None:
    def separator(previous: int, following: int, edge: Edge) -> list[int]:
        return [-edge, -1000 * previous - following]

    tree: ParagraphTree[int] = ParagraphTree()
    stream = TreeStream(tree, separator)
    taken: list[int] = []
    for event in events:
        apply(tree, event)
        taken += stream.take()

    assert taken == restore(tree, separator)


def test_a_sibling_waits_for_its_whole_child_subtree() -> None:
    tree: ParagraphTree[str] = ParagraphTree()
    stream = TreeStream(tree)
    child, grandchild = ThreadId("child"), ThreadId("grandchild")
    tree.append(ROOT_THREAD, "A")
    assert stream.take() == ["A"]

    tree.fork(ROOT_THREAD, child)
    tree.append(ROOT_THREAD, "Z")
    tree.finish(ROOT_THREAD)
    assert stream.take() == []

    tree.append(child, "b")
    tree.fork(child, grandchild)
    tree.finish(child)
    assert stream.take() == ["b"]

    tree.append(grandchild, "c")
    assert stream.take() == ["c"]

    tree.finish(grandchild, ended=False)
    assert stream.take() == ["Z"]


def test_a_separator_is_inserted_with_the_item_after_it() -> None:
    calls: list[tuple[str, str, Edge]] = []

    def separator(previous: str, following: str, edge: Edge) -> str:
        calls.append((previous, following, edge))
        return "/"

    tree: ParagraphTree[str] = ParagraphTree()
    stream = TreeStream(tree, separator)
    child = ThreadId("child")
    tree.append(ROOT_THREAD, "A")
    tree.fork(ROOT_THREAD, child)
    assert stream.take() == ["A"]
    assert calls == []

    tree.append(child, "b")
    assert stream.take() == ["/", "b"]
    tree.append(child, "c")
    assert stream.take() == ["c"]
    assert calls == [("A", "b", Edge.FIRST_CHILD)]


def test_items_may_be_none() -> None:
    tree: ParagraphTree[None] = ParagraphTree()
    child = ThreadId("child")
    stream = TreeStream(tree, lambda *_: [None, None])
    tree.append(ROOT_THREAD, [None])
    tree.fork(ROOT_THREAD, child)
    tree.append(child, [None])

    assert len(stream.take()) == 4


def test_taking_never_walks_the_tree_again() -> None:
    """Counts slices of items: one per call, and one per paragraph read."""
    num_reads = 0

    class CountedList(list[int]):
        def __getitem__(self, key: object) -> list[int]:  # type: ignore[override]  # slices only
            nonlocal num_reads
            num_reads += 1
            return super().__getitem__(key)  # type: ignore[call-overload, no-any-return]  # as above

    tree: ParagraphTree[int] = ParagraphTree()
    stream = TreeStream(tree)
    num_forks, num_calls = 200, 0
    for fork in range(num_forks):
        child = ThreadId(str(fork))
        node = tree.threads[ROOT_THREAD].current_node
        node.items = CountedList()
        tree.append(ROOT_THREAD, [fork])
        tree.fork(ROOT_THREAD, child)
        tree.threads[child].current_node.items = CountedList()
        for item in range(5):
            tree.append(child, [item])
            stream.take()
            num_calls += 1
        tree.finish(child)

    num_paragraphs = 2 * num_forks + 1
    assert num_reads <= num_calls + num_paragraphs
