"""A paragraph tree as one row of tokens, each token once, each thread reading its own path.

Dimensions: B rows, T tokens of the longest row, S segments of the row that has the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.data.records import ParagraphRecord

IGNORED_TARGET = -100

EncodeText = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class PackedTree:
    """One example as a row, or several that share one.

    `positions[i]` is the number of tokens before i on its path from the root. `targets[i]` is the
    token that i has to predict, or IGNORED_TARGET. `segments[i]` is the stretch between forks
    that i belongs to, and `segment_parents[s]` the stretch before s on its path. A segment without
    a parent begins an example, which reads nothing of the others in its row.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    targets: Sequence[int]
    segments: Sequence[int]
    segment_parents: Sequence[int | None]


@dataclass
class _Row:
    """A packed row while it grows."""

    tokens: TreeTokens
    encode: EncodeText
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    segment_parents: list[int | None] = field(default_factory=list)

    def open_segment(self, parent: int | None) -> int:
        self.segment_parents.append(parent)
        return len(self.segment_parents) - 1

    def add(self, token_id: int, segment: int, before: int | None, *, learn: bool) -> int:
        """Append a token whose path continues from row index `before`; return its row index."""
        index = len(self.token_ids)
        self.token_ids.append(token_id)
        self.positions.append(0 if before is None else self.positions[before] + 1)
        self.targets.append(IGNORED_TARGET)
        self.segments.append(segment)
        if learn and before is not None:
            self.targets[before] = token_id
        return index

    def add_thread(self, first: ParagraphRecord, segment: int, before: int | None) -> None:
        """Append a thread and, after each of its forks, the thread of the detail."""
        paragraph: ParagraphRecord | None = first
        while paragraph is not None:
            for token_id in self.encode(paragraph.text):
                before = self.add(token_id, segment, before, learn=True)
            if paragraph.first_child is None:
                break
            before = self.add(self.tokens.fork_id, segment, before, learn=True)
            inner = self.open_segment(segment)
            # [Child] is injected by the server, so it is read but never learned.
            child = self.add(self.tokens.child_id, inner, before, learn=False)
            self.add_thread(paragraph.first_child, inner, child)
            segment = self.open_segment(segment)
            paragraph = paragraph.next_sibling
        self.add(self.tokens.end_id, segment, before, learn=True)


def pack_tree(
    prompt_ids: Sequence[int], answer: ParagraphRecord, encode: EncodeText, tokens: TreeTokens
) -> PackedTree:
    """Return the example as one row: prompt, then the threads in reading order.

    The prompt and [Child] are not predicted by any token. [Fork] predicts what its own thread
    goes on with, so each token has at most one target.
    """
    row = _Row(tokens, encode)
    segment = row.open_segment(None)
    before: int | None = None
    for token_id in prompt_ids:
        before = row.add(token_id, segment, before, learn=False)
    row.add_thread(answer, segment, before)
    return PackedTree(row.token_ids, row.positions, row.targets, row.segments, row.segment_parents)


def join_trees(trees: Sequence[PackedTree]) -> PackedTree:
    """Return one row that holds the trees side by side; without trees it is empty."""
    if len(trees) == 1:
        return trees[0]
    token_ids: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    segments: list[int] = []
    parents: list[int | None] = []
    for tree in trees:
        first = len(parents)
        token_ids += tree.token_ids
        positions += tree.positions
        targets += tree.targets
        segments += [first + segment for segment in tree.segments]
        parents += [None if parent is None else first + parent for parent in tree.segment_parents]
    return PackedTree(token_ids, positions, targets, segments, parents)


def next_indices(packed: PackedTree) -> list[int | None]:
    """Return, for each token, the row index of the one that follows it in its own thread."""
    following: list[int | None] = [None] * len(packed.token_ids)
    last_of_segment: dict[int, int] = {}
    for index, segment in enumerate(packed.segments):
        before = index - 1
        parent = packed.segment_parents[segment]
        if segment in last_of_segment:
            following[last_of_segment[segment]] = index
        elif parent is not None and packed.segments[before] != parent:
            # A child stands right behind its fork; the fork's own thread goes on behind the child.
            following[last_of_segment[parent]] = index
        last_of_segment[segment] = index
    return following


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """Rows of packed trees, padded to one length.

    `token_ids_BT`, `positions_BT`, `targets_BT` and `segments_BT` are int64. `visible_BSS` says
    which segments (last axis) a segment may read; the last one of each row is that of padding and
    reads nothing.
    """

    token_ids_BT: Tensor
    positions_BT: Tensor
    targets_BT: Tensor
    segments_BT: Tensor
    visible_BSS: Tensor

    @property
    def holds_token_BT(self) -> Tensor:
        """Which places hold a token of a tree, and not padding: bool [B, T]."""
        return self.segments_BT < self.visible_BSS.shape[-1] - 1

    @property
    def num_trees(self) -> int:
        """Trees in all rows: each has one token that none comes before."""
        return int(((self.positions_BT == 0) & self.holds_token_BT).sum())

    @property
    def mask_B1TT(self) -> Tensor:
        """Which tokens (last axis) each token attends to, as SDPA takes it: bool [B, 1, T, T]."""
        return tree_attention_mask(self)


def visible_segments(segment_parents: Sequence[int | None]) -> Tensor:
    """Return bool [S, S]: a segment reads itself and the segments on its path from the root."""
    visible_SS = torch.eye(len(segment_parents), dtype=torch.bool)
    for segment, parent in enumerate(segment_parents):
        if parent is not None:
            visible_SS[segment] |= visible_SS[parent]
    return visible_SS


def tree_attention_mask(batch: TreeBatch) -> Tensor:
    """Let each token attend to itself and to the tokens before it on its path from the root.

    Returns bool [B, 1, T, T], row = query, column = key, true = attend. Padding attends to itself.
    """
    segments_BT = batch.segments_BT
    rows_B11 = torch.arange(len(segments_BT), device=segments_BT.device)[:, None, None]
    mask_BTT = batch.visible_BSS[rows_B11, segments_BT[:, :, None], segments_BT[:, None, :]].tril()
    itself_TT = torch.eye(segments_BT.shape[1], dtype=torch.bool, device=segments_BT.device)
    return (mask_BTT | itself_TT)[:, None]


def padded_width(lengths: Sequence[int], multiple: int) -> int:
    """Return the tokens of every row of a batch; empty rows are padding, at least one token."""
    return -(-max(1, *lengths) // multiple) * multiple


def batch_trees(trees: Sequence[PackedTree], pad_id: int, *, multiple: int = 1) -> TreeBatch:
    """Pad the rows on the right to a multiple of tokens; padding has no target."""
    width = padded_width([len(tree.token_ids) for tree in trees], multiple)
    num_segments = max(len(tree.segment_parents) for tree in trees)
    shape = (len(trees), width)
    token_ids_BT = torch.full(shape, pad_id)
    positions_BT = torch.zeros(shape, dtype=torch.int64)
    targets_BT = torch.full(shape, IGNORED_TARGET)
    segments_BT = torch.full(shape, num_segments)
    visible_BSS = torch.zeros(len(trees), num_segments + 1, num_segments + 1, dtype=torch.bool)
    for row, tree in enumerate(trees):
        length = len(tree.token_ids)
        token_ids_BT[row, :length] = torch.tensor(tree.token_ids)
        positions_BT[row, :length] = torch.tensor(tree.positions)
        targets_BT[row, :length] = torch.tensor(tree.targets)
        segments_BT[row, :length] = torch.tensor(tree.segments)
        visible_SS = visible_segments(tree.segment_parents)
        visible_BSS[row, : len(visible_SS), : len(visible_SS)] = visible_SS
    return TreeBatch(token_ids_BT, positions_BT, targets_BT, segments_BT, visible_BSS)


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
