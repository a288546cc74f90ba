"""Threads of a finished tree: the tokens that each generated, and the prefix that it read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from apar_core.tree.paragraph import ParagraphNode, ParagraphTree
from apar_core.tree.thread_names import ThreadId, replay_key

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ThreadText(Generic[Item]):
    """One thread of a tree.

    `paragraphs` are the items between its forks, one more than `children`; they may be empty.
    """

    thread: ThreadId
    parent: ThreadId | None
    paragraphs: tuple[Sequence[Item], ...]
    children: tuple[ThreadId, ...]
    ended: bool

    def generated(self, fork: Item, end: Item) -> list[Item]:
        """Return all generated tokens: text, fork tokens, and an end token if the thread ended."""
        items: list[Item] = list(self.paragraphs[0])
        for paragraph in self.paragraphs[1:]:
            items.append(fork)
            items.extend(paragraph)
        return [*items, end] if self.ended else items


def thread_texts(tree: ParagraphTree[Item]) -> dict[ThreadId, ThreadText[Item]]:
    """Return every thread of a tree, parents before their children."""
    texts: dict[ThreadId, ThreadText[Item]] = {}
    for thread, record in tree.threads.items():
        paragraphs: list[Sequence[Item]] = []
        node: ParagraphNode[Item] | None = record.first_node
        while node is not None:
            paragraphs.append(node.items)
            node = node.next_sibling
        texts[thread] = ThreadText(
            thread=thread,
            parent=record.parent,
            paragraphs=tuple(paragraphs),
            children=tuple(record.children),
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
    """Return a thread's prefix: the prompt, then its ancestors' text, fork and child tokens."""
    text = texts[thread]
    if text.parent is None:
        return list(prompt)
    parent = texts[text.parent]
    prefix = thread_prefix(texts, text.parent, prompt, fork, child)
    prefix.extend(parent.paragraphs[0])
    for paragraph in parent.paragraphs[1 : parent.children.index(thread) + 1]:
        prefix.append(fork)
        prefix.extend(paragraph)
    return [*prefix, fork, child]


def thread_scripts(tree: ParagraphTree[Item], fork: Item, end: Item) -> dict[str, list[Item]]:
    """Return what each thread generates, fork and end tokens included, by its replay key.

    Where a thread has waited for its children, its script has neither fork tokens nor what was
    forced between its own items.
    """
    scripts: dict[str, list[Item]] = {}
    for thread, text in thread_texts(tree).items():
        record = tree.threads[thread]
        if not record.blocks and not record.num_closing:
            scripts[replay_key(thread)] = text.generated(fork, end)
            continue
        paragraphs = [list(paragraph) for paragraph in text.paragraphs]
        for block, num_forced in zip(record.blocks, record.suffixes, strict=False):
            del paragraphs[block.first_child + block.num_children][:num_forced]
        last = paragraphs[-1]
        del last[len(last) - record.num_closing :]
        own = [item for paragraph in paragraphs for item in paragraph]
        scripts[replay_key(thread)] = [*own, end] if text.ended else own
    return scripts
