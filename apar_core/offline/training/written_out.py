"""The same tree as ordinary sequences, one a thread: what packing has to equal, and its rival."""

from __future__ import annotations

from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, next_indices


def written_out(packed: PackedTree, tokens: TreeTokens) -> list[PackedTree]:
    """Return one row for each thread, with its whole path from the root of the tree.

    Every target of the packed row is learned in exactly one of them. What a thread has in common
    with its parent is read again but not learned again, so the fork token of the parent learns
    what the parent goes on with and nothing in the child's row.
    """
    paths = _paths(packed)
    rows = []
    for path in paths:
        opened = max(
            (at for at, index in enumerate(path) if packed.token_ids[index] == tokens.child_id),
            default=0,
        )
        # [Child] stands in every thread but the root's, and the prompt holds none.
        targets = [
            packed.targets[index] if at >= opened else IGNORED_TARGET
            for at, index in enumerate(path)
        ]
        length = len(path)
        rows.append(
            PackedTree(
                [packed.token_ids[index] for index in path],
                list(range(length)), targets, [0] * length, [None],
            )
        )  # fmt: skip
    return rows


def _paths(packed: PackedTree) -> list[list[int]]:
    """Return, for each thread, the row indices of its tokens and of all that it reads."""
    indices: dict[int, list[int]] = {}
    for index, segment in enumerate(packed.segments):
        indices.setdefault(segment, []).append(index)
    following = next_indices(packed)
    paths = []
    for segment, rows in indices.items():
        if following[rows[-1]] is not None:
            continue
        at: int | None = segment
        path: list[int] = []
        while at is not None:
            path = [*indices[at], *path]
            at = packed.segment_parents[at]
        paths.append(path)
    return paths
