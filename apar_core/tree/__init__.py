"""Paragraph tree of a request, which makes one text of its threads (APAR, arXiv 2401.06761)."""

from apar_core.tree.block_statistics import thread_steps
from apar_core.tree.paragraph import (
    ParagraphNode,
    ParagraphTree,
    ThreadRecord,
)
from apar_core.tree.restore import Edge, Separator, TreeStream, restore
from apar_core.tree.statistics import (
    ThreadSpan,
    TreeStatistics,
    thread_spans,
    tree_statistics,
    unforked_statistics,
)
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId, child_thread

__all__ = [
    "ROOT_THREAD",
    "Edge",
    "ParagraphNode",
    "ParagraphTree",
    "Separator",
    "ThreadId",
    "ThreadRecord",
    "ThreadSpan",
    "TreeStatistics",
    "TreeStream",
    "child_thread",
    "restore",
    "thread_spans",
    "thread_steps",
    "tree_statistics",
    "unforked_statistics",
]
