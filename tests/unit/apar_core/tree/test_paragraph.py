import pytest

from apar_core.errors import TreeError
from apar_core.tree import ROOT_THREAD, ParagraphTree, ThreadId

CHILD = ThreadId("child")


def test_fork_closes_the_paragraph_and_opens_its_child_and_sibling() -> None:
    tree: ParagraphTree[str] = ParagraphTree()
    tree.append(ROOT_THREAD, ["1.", "Tune"])

    tree.fork(ROOT_THREAD, CHILD)
    tree.append(ROOT_THREAD, ["2.", "Play"])
    tree.append(CHILD, ["Use", "a", "fork"])

    assert tree.root.closed
    assert tree.root.items == ["1.", "Tune"]
    assert tree.root.first_child is not None
    assert tree.root.first_child.items == ["Use", "a", "fork"]
    assert tree.root.next_sibling is not None
    assert tree.root.next_sibling.items == ["2.", "Play"]
    assert not tree.root.next_sibling.closed


def test_threads_know_parent_depth_and_fork_index() -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    tree.append(ROOT_THREAD, [1, 2])
    tree.fork(ROOT_THREAD, CHILD)
    tree.fork(ROOT_THREAD, ThreadId("second"))
    tree.append(CHILD, [3])
    tree.fork(CHILD, ThreadId("grandchild"))

    assert list(tree.threads) == [ROOT_THREAD, CHILD, "second", "grandchild"]
    assert [record.parent for record in tree.threads.values()] == [
        None,
        ROOT_THREAD,
        ROOT_THREAD,
        CHILD,
    ]
    assert [record.depth for record in tree.threads.values()] == [0, 1, 1, 2]
    # The second fork token of the root follows two items and the first fork token.
    assert [record.fork_index for record in tree.threads.values()] == [0, 2, 3, 1]


def test_a_tree_is_finished_once_its_last_thread_is() -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    tree.fork(ROOT_THREAD, CHILD)
    assert not tree.finished

    tree.finish(ROOT_THREAD)
    assert not tree.finished

    tree.finish(CHILD, ended=False)
    assert tree.finished
    assert tree.threads[ROOT_THREAD].ended
    assert not tree.threads[CHILD].ended


def test_unknown_threads_are_refused_with_the_number_of_known_ones() -> None:
    tree: ParagraphTree[int] = ParagraphTree()

    with pytest.raises(TreeError, match="cannot append to thread 'child': unknown among 1 threads"):
        tree.append(CHILD, [1])
    with pytest.raises(TreeError, match="cannot fork thread 'child'"):
        tree.fork(CHILD, ThreadId("grandchild"))
    with pytest.raises(TreeError, match="cannot finish thread 'child'"):
        tree.finish(CHILD)


def test_a_finished_thread_cannot_change() -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    tree.append(ROOT_THREAD, [1, 2])
    tree.fork(ROOT_THREAD, CHILD)
    tree.finish(ROOT_THREAD)

    message = "cannot append to thread 'root': it finished after 2 items and 1 forks"
    with pytest.raises(TreeError, match=message):
        tree.append(ROOT_THREAD, [3])
    with pytest.raises(TreeError, match="cannot fork"):
        tree.fork(ROOT_THREAD, ThreadId("late"))
    with pytest.raises(TreeError, match="cannot finish"):
        tree.finish(ROOT_THREAD)


@pytest.mark.parametrize("taken", [CHILD, ROOT_THREAD])
def test_a_child_needs_a_new_id(taken: ThreadId) -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    tree.fork(ROOT_THREAD, CHILD)

    with pytest.raises(TreeError, match=f"cannot fork '{taken}': it is already one of 2 threads"):
        tree.fork(ROOT_THREAD, taken)

    assert len(tree.threads) == 2
    assert tree.threads[ROOT_THREAD].children == [CHILD]


def test_thread_records_cannot_be_added_from_outside() -> None:
    tree: ParagraphTree[int] = ParagraphTree()

    with pytest.raises(TypeError, match="does not support item assignment"):
        tree.threads[CHILD] = tree.threads[ROOT_THREAD]  # type: ignore[index]  # the point here
