"""When each thread runs, in the paper's schedule.

Source: APAR (arXiv 2401.06761), algorithm 1. Every live thread gains one token a step, and a
child's first token comes in the step after its fork token; [Child] is forced into that step and
costs none. The engine's own schedule is slower where a child has to wait.
"""

from dataclasses import dataclass
from typing import TypeVar

from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.thread_names import ThreadId

Item = TypeVar("Item")


@dataclass(slots=True)
class ThreadSpan:
    """A thread generates one token in each of the steps start + 1 ... end.

    `num_shared` is how many of its parent's tokens it reads, fork token included; `num_before`
    counts all tokens on its path before its first own one, without the prompt.
    `subtree_end` is the last step of the thread or of any thread below it.
    """

    start: int
    num_shared: int
    num_before: int
    num_generated: int
    subtree_end: int

    @property
    def end(self) -> int:
        """Step of the thread's last token."""
        return self.start + self.num_generated


def thread_spans(tree: ParagraphTree[Item]) -> dict[ThreadId, ThreadSpan]:
    """The span of every thread, parents before their children; steps count from 1."""
    spans: dict[ThreadId, ThreadSpan] = {}
    for thread, record in tree.threads.items():
        start = num_shared = num_before = 0
        if record.parent is not None:
            parent = spans[record.parent]
            num_shared = record.fork_index + 1
            start = parent.start + num_shared
            # One more: [Child].
            num_before = parent.num_before + num_shared + 1
        num_generated = record.num_items + len(record.children) + record.ended
        spans[thread] = ThreadSpan(
            start, num_shared, num_before, num_generated, subtree_end=start + num_generated
        )
    for thread, record in reversed(list(tree.threads.items())):
        if record.parent is not None:
            parent = spans[record.parent]
            parent.subtree_end = max(parent.subtree_end, spans[thread].subtree_end)
    return spans
