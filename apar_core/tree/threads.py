"""A finished tree as its threads: what each one generated, and the sequence that it continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from apar_core.tree.paragraph import ROOT_THREAD, ParagraphNode, ParagraphTree, ThreadId

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ThreadText(Generic[Item]):
    """One thread of a tree.

    `paragraphs` are the items between its forks, one more than `children`; some may be empty.
    `start_step` is the step that generated its first token where every live thread gains one
    token a step, the request's first step being 0.
    """

    thread: ThreadId
    parent: ThreadId | None
    paragraphs: tuple[Sequence[Item], ...]
    children: tuple[ThreadId, ...]
    start_step: int
    ended: bool

    @property
    def num_tokens(self) -> int:
        """Tokens that the thread generated: text, fork tokens and its end token."""
        return sum(map(len, self.paragraphs)) + len(self.children) + self.ended


def thread_texts(tree: ParagraphTree[Item]) -> dict[ThreadId, ThreadText[Item]]:
    """Every thread of a tree, parents before their children."""
    texts: dict[ThreadId, ThreadText[Item]] = {}
    first_nodes: dict[ThreadId, ParagraphNode[Item]] = {ROOT_THREAD: tree.root}
    for thread, record in tree.threads.items():
        paragraphs: list[Sequence[Item]] = []
        node: ParagraphNode[Item] | None = first_nodes[thread]
        children = iter(record.children)
        while node is not None:
            paragraphs.append(node.items)
            if node.first_child is not None:
                first_nodes[next(children)] = node.first_child
            node = node.next_sibling
        parent_start = 0 if record.parent is None else texts[record.parent].start_step
        # The fork token itself takes a step of the parent.
        forked = 0 if record.parent is None else record.fork_index + 1
        texts[thread] = ThreadText(
            thread=thread,
            parent=record.parent,
            paragraphs=tuple(paragraphs),
            children=tuple(record.children),
            start_step=parent_start + forked,
            ended=record.ended,
        )
    return texts


def thread_prefix(
    texts: dict[ThreadId, ThreadText[Item]],
    thread: ThreadId,
    prompt: Sequence[Item],
    fork: Item,
    child: Item,
) -> list[Item]:
    """The sequence that a thread continued: prompt, its ancestors' text, fork and child tokens."""
    text = texts[thread]
    if text.parent is None:
        return list(prompt)
    parent = texts[text.parent]
    prefix = thread_prefix(texts, text.parent, prompt, fork, child)
    ordinal = parent.children.index(thread)
    for index, paragraph in enumerate(parent.paragraphs[: ordinal + 1]):
        if index > 0:
            prefix.append(fork)
        prefix.extend(paragraph)
    return [*prefix, fork, child]
