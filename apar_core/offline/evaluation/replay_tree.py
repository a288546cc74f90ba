"""A recorded answer as the tree of token ids that a decoder is made to generate."""

from __future__ import annotations

from collections.abc import Callable

from apar_core.offline.data.records import ParagraphRecord, thread_paragraphs
from apar_core.offline.training.packing import TreeTokens
from apar_core.tree.paragraph import ROOT_THREAD, ParagraphTree, ThreadId
from apar_core.tree.restore import restore
from apar_core.tree.threads import thread_texts

EncodeText = Callable[[str], list[int]]


def token_tree(answer: ParagraphRecord, encode: EncodeText) -> ParagraphTree[int]:
    """Return the answer's finished tree, each paragraph encoded by itself, every thread ended.

    A fork divides the text for the model too, so no token reaches over one.
    """
    tree: ParagraphTree[int] = ParagraphTree()
    _add_thread(tree, ROOT_THREAD, answer, encode)
    return tree


def flat_tree(tree: ParagraphTree[int]) -> ParagraphTree[int]:
    """Return the same tokens in reading order, as one thread."""
    flat: ParagraphTree[int] = ParagraphTree()
    flat.append(ROOT_THREAD, restore(tree))
    flat.finish(ROOT_THREAD)
    return flat


def thread_scripts(tree: ParagraphTree[int], tokens: TreeTokens) -> dict[str, list[int]]:
    """Return what each thread generates by its path ("" for the root thread, "0.2" below it)."""
    return {
        thread.removeprefix(ROOT_THREAD).removeprefix("."): text.generated(
            tokens.fork_id, tokens.end_id
        )
        for thread, text in thread_texts(tree).items()
    }


def _add_thread(
    tree: ParagraphTree[int], thread: ThreadId, first: ParagraphRecord, encode: EncodeText
) -> None:
    details: list[tuple[ThreadId, ParagraphRecord]] = []
    for paragraph in thread_paragraphs(first):
        tree.append(thread, encode(paragraph.text))
        if paragraph.first_child is not None:
            child = ThreadId(f"{thread}.{len(details)}")
            tree.fork(thread, child)
            details.append((child, paragraph.first_child))
    tree.finish(thread)
    for child, detail in details:
        _add_thread(tree, child, detail, encode)
