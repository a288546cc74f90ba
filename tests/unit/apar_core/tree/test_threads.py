from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId
from apar_core.tree.threads import thread_prefix, thread_scripts, thread_texts

FORK, CHILD, END = -1, -2, -3
FIRST, NESTED, SECOND = ThreadId("first"), ThreadId("nested"), ThreadId("second")


def nested_tree() -> ParagraphTree[int]:
    """Root 1 2 | 3 | 4, its first child 10 | 11, that one's child 20, its second child 30 31."""
    tree: ParagraphTree[int] = ParagraphTree()
    tree.append(ROOT_THREAD, [1, 2])
    tree.fork(ROOT_THREAD, FIRST)
    tree.append(ROOT_THREAD, [3])
    tree.append(FIRST, [10])
    tree.fork(FIRST, NESTED)
    tree.fork(ROOT_THREAD, SECOND)
    tree.append(NESTED, [20])
    tree.append(FIRST, [11])
    tree.append(SECOND, [30, 31])
    tree.append(ROOT_THREAD, [4])
    tree.finish(NESTED)
    tree.finish(FIRST)
    tree.finish(SECOND, ended=False)
    tree.finish(ROOT_THREAD)
    return tree


def test_threads_hold_their_paragraphs_between_forks() -> None:
    texts = thread_texts(nested_tree())

    assert texts[ROOT_THREAD].paragraphs == ([1, 2], [3], [4])
    assert texts[FIRST].paragraphs == ([10], [11])
    assert texts[NESTED].paragraphs == ([20],)
    assert texts[SECOND].paragraphs == ([30, 31],)
    assert texts[ROOT_THREAD].children == (FIRST, SECOND)


def test_generated_tokens_include_fork_and_end_tokens() -> None:
    texts = thread_texts(nested_tree())

    assert texts[ROOT_THREAD].generated(FORK, END) == [1, 2, FORK, 3, FORK, 4, END]
    assert texts[FIRST].generated(FORK, END) == [10, FORK, 11, END]
    # Cut before its end.
    assert texts[SECOND].generated(FORK, END) == [30, 31]


def test_prefix_is_the_path_with_control_tokens() -> None:
    texts = thread_texts(nested_tree())

    assert thread_prefix(texts, ROOT_THREAD, [100], FORK, CHILD) == [100]
    assert thread_prefix(texts, SECOND, [100], FORK, CHILD) == [100, 1, 2, FORK, 3, FORK, CHILD]
    nested = [100, 1, 2, FORK, CHILD, 10, FORK, CHILD]
    assert thread_prefix(texts, NESTED, [100], FORK, CHILD) == nested


def test_a_thread_that_waited_generated_neither_headers_nor_joined_texts() -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    for first, suffix in ((1, [70, 71]), (2, [80])):
        names = [ThreadId(f"{first}a"), ThreadId(f"{first}b")]
        tree.append(ROOT_THREAD, [first])
        tree.open_block(ROOT_THREAD, names, [1, 1], [[90], [91]])
        for name in names:
            tree.append(name, [10 * first])
            tree.close_child(name, [99] if name.endswith("b") else [], is_closed=True)
            tree.finish(name, ended=False)
        tree.join(ROOT_THREAD, suffix)
    tree.append(ROOT_THREAD, [3])
    tree.finish(ROOT_THREAD)

    scripts = thread_scripts(tree, FORK, END)

    assert scripts.pop("") == [1, 2, 3, END]
    assert list(scripts.values()) == [[10], [10], [20], [20]]
