"""The threads of an answer as a tree for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.text import Text
from rich.tree import Tree

from apar_core.tree import (
    ROOT_THREAD,
    ParagraphTree,
    ThreadId,
    ThreadSpan,
    TreeStatistics,
    thread_spans,
)

Item = TypeVar("Item")

Decode = Callable[[Sequence[Item]], str]


def thread_view(tree: ParagraphTree[Item], decode: Decode[Item]) -> Tree:
    """Every thread with its tokens, its steps and its paragraphs, children where they forked."""
    spans = thread_spans(tree)
    root = Tree(_thread_label(ROOT_THREAD, tree, spans[ROOT_THREAD]))
    pending = [(ROOT_THREAD, root, tree.root)]
    while pending:
        thread, branch, node = pending.pop()
        for child in (*tree.threads[thread].children, None):
            text = decode(node.items).strip()
            if text:
                branch.add(Text(text))
            if child is None or node.first_child is None or node.next_sibling is None:
                break
            child_branch = branch.add(_thread_label(child, tree, spans[child]))
            pending.append((child, child_branch, node.first_child))
            node = node.next_sibling
    return root


def statistics_line(statistics: TreeStatistics) -> str:
    """What forking saved, in one line."""
    saved_attention = _saved(statistics.attended_tokens, statistics.sequential_attended_tokens)
    saved_cache = _saved(statistics.max_cached_tokens, statistics.sequential_max_cached_tokens)
    return (
        f"{statistics.threads} threads, {statistics.text_tokens} tokens in "
        f"{statistics.decode_steps} steps instead of {statistics.sequential_steps}; "
        f"attended tokens {saved_attention}, most cached tokens {saved_cache}"
    )


def _thread_label(thread: ThreadId, tree: ParagraphTree[Item], span: ThreadSpan) -> Text:
    record = tree.threads[thread]
    label = Text(thread, style="bold cyan")
    steps = f"steps {span.start + 1}-{span.end}" if span.num_generated else "no step"
    ending = "" if record.ended else ", cut off"
    label.append(f"  {record.num_items} tokens, {steps}{ending}", style="dim")
    return label


def _saved(count: int, sequential: int) -> str:
    change = 0.0 if sequential == 0 else 100 * (count - sequential) / sequential
    return f"{change:+.0f} %"
