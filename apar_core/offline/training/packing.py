"""Packing of paragraph trees: one row with each token once, where each thread reads its own path.

`written_out` gives the same tree as ordinary sequences, one per thread, which packing must equal.

Dimensions: B rows, T tokens of the longest row, S segments of the row with the most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.data.joined import JoinedTokens
from apar_core.offline.data.records import ParagraphRecord

IGNORED_TARGET = -100

EncodeText = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class PackedTree:
    """Row with one example or several side by side.

    A segment is the part of a thread between two forks. `segments[i]` is the segment of token i,
    and `segment_parents[s]` the segment before s on its path. A segment without a parent starts an
    example, which does not read the others in its row. `positions[i]` is the number of tokens
    before i on its path. `targets[i]` is the token to predict after i, or IGNORED_TARGET.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    targets: Sequence[int]
    segments: Sequence[int]
    segment_parents: Sequence[int | None]

    @property
    def num_sequences(self) -> int:
        """Number of ordinary sequences with the same paths, one per thread."""
        return len(self.segment_parents) - len({*self.segment_parents} - {None})


@dataclass
class _Row:
    """Packed row under construction."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    segment_parents: list[int | None] = field(default_factory=list)

    def open_segment(self, parent: int | None) -> int:
        self.segment_parents.append(parent)
        return len(self.segment_parents) - 1

    def add(self, token_id: int, segment: int, before: int | None, *, learn: bool) -> int:
        """Append a token that follows row index `before` on its path; return its row index."""
        index = len(self.token_ids)
        self.token_ids.append(token_id)
        self.positions.append(0 if before is None else self.positions[before] + 1)
        self.targets.append(IGNORED_TARGET)
        self.segments.append(segment)
        if learn and before is not None:
            self.targets[before] = token_id
        return index

    def extend(
        self, token_ids: Iterable[int], segment: int, before: int | None, *, learn: bool
    ) -> int | None:
        """Append tokens; return the row index of the last token on the path."""
        for token_id in token_ids:
            before = self.add(token_id, segment, before, learn=learn)
        return before

    def packed(self) -> PackedTree:
        return PackedTree(
            self.token_ids, self.positions, self.targets, self.segments, self.segment_parents
        )


def _add_thread(
    row: _Row,
    first: ParagraphRecord,
    segment: int,
    before: int | None,
    encode: EncodeText,
    tokens: TreeTokens,
) -> None:
    """Append a thread, with the detail's thread after each fork."""
    paragraph: ParagraphRecord | None = first
    while paragraph is not None:
        before = row.extend(encode(paragraph.text), segment, before, learn=True)
        if paragraph.first_child is None:
            break
        before = row.add(tokens.fork_id, segment, before, learn=True)
        inner = row.open_segment(segment)
        # The server injects [Child], so it is read but never learned.
        child = row.add(tokens.child_id, inner, before, learn=False)
        _add_thread(row, paragraph.first_child, inner, child, encode, tokens)
        segment = row.open_segment(segment)
        paragraph = paragraph.next_sibling
    row.add(tokens.end_id, segment, before, learn=True)


def pack_tree(
    prompt_ids: Sequence[int], answer: ParagraphRecord, encode: EncodeText, tokens: TreeTokens
) -> PackedTree:
    """Return the example as one row: prompt, then threads in reading order.

    No token predicts the prompt or [Child]. [Fork] predicts the next token of its own thread, so
    each token has at most one target.
    """
    row = _Row()
    segment = row.open_segment(None)
    before = row.extend(prompt_ids, segment, None, learn=False)
    _add_thread(row, answer, segment, before, encode, tokens)
    return row.packed()


def pack_text(prompt_ids: Sequence[int], text_ids: Sequence[int], end_id: int) -> PackedTree:
    """Return an answer of one thread as one row."""
    row = _Row()
    segment = row.open_segment(None)
    before = row.extend(prompt_ids, segment, None, learn=False)
    row.extend((*text_ids, end_id), segment, before, learn=True)
    return row.packed()


def pack_joined(prompt_ids: Sequence[int], answer: JoinedTokens, end_id: int) -> PackedTree:
    """Return the example as one row in which every generation reads exactly its context.

    Only what a thread writes is learned, and each token of it once: prompt, seeds and the joined
    texts in front of the parent's continuation are read. The continuation's path leads through the
    first thread, whose tokens have the same positions in the joined text. The texts of the others
    are in the row a second time, at the positions after it.
    """
    row = _Row()
    segment = row.open_segment(None)
    before = row.extend(prompt_ids, segment, None, learn=False)
    for written, block in zip(answer.parent, (*answer.blocks, None), strict=True):
        before = row.extend(written, segment, before, learn=True)
        if block is None:
            break
        threads = []
        for seed, text in zip(block.seeds, block.texts, strict=True):
            inner = row.open_segment(segment)
            seeded = row.extend(seed, inner, before, learn=False)
            threads.append((inner, row.extend(text, inner, seeded, learn=True)))
        first, before = threads[0]
        segment = row.open_segment(first)
        before = row.extend(block.rest, segment, before, learn=False)
    row.add(end_id, segment, before, learn=True)
    return row.packed()


def join_trees(trees: Sequence[PackedTree]) -> PackedTree:
    """Return a row with the trees side by side; it is empty without trees."""
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
    """Return the row index of each token's successor in its own thread, or None."""
    following: list[int | None] = [None] * len(packed.token_ids)
    last_of_segment: dict[int, int] = {}
    for index, segment in enumerate(packed.segments):
        before = index - 1
        parent = packed.segment_parents[segment]
        if segment in last_of_segment:
            following[last_of_segment[segment]] = index
        elif parent is not None and packed.segments[before] != parent:
            # The child directly follows its fork, and the fork's thread continues after the child.
            following[last_of_segment[parent]] = index
        last_of_segment[segment] = index
    return following


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """Rows of packed trees, padded to the same length.

    `token_ids_BT`, `positions_BT`, `targets_BT` and `segments_BT` are int64. `visible_BSS` (bool)
    says which segments (last axis) a segment reads. The last segment of each row is padding, which
    reads nothing.
    """

    token_ids_BT: Tensor
    positions_BT: Tensor
    targets_BT: Tensor
    segments_BT: Tensor
    visible_BSS: Tensor

    @property
    def holds_token_BT(self) -> Tensor:
        """Bool [B, T], false for padding."""
        return self.segments_BT < self.visible_BSS.shape[-1] - 1

    @property
    def num_trees(self) -> int:
        """Number of trees in all rows; each has one token at position 0."""
        return int(((self.positions_BT == 0) & self.holds_token_BT).sum())


def visible_segments(segment_parents: Sequence[int | None]) -> Tensor:
    """Return bool [S, S]: each segment reads itself and the segments before it on its path."""
    visible_SS = torch.eye(len(segment_parents), dtype=torch.bool)
    for segment, parent in enumerate(segment_parents):
        if parent is not None:
            visible_SS[segment] |= visible_SS[parent]
    return visible_SS


def tree_attention_mask(batch: TreeBatch) -> Tensor:
    """Let each token attend to itself and to the tokens before it on its path.

    Returns bool [B, 1, T, T] as SDPA takes it: row = query, column = key, true = attend. Padding
    attends to itself.
    """
    segments_BT = batch.segments_BT
    rows_B11 = torch.arange(len(segments_BT), device=segments_BT.device)[:, None, None]
    mask_BTT = batch.visible_BSS[rows_B11, segments_BT[:, :, None], segments_BT[:, None, :]].tril()
    itself_TT = torch.eye(segments_BT.shape[1], dtype=torch.bool, device=segments_BT.device)
    return (mask_BTT | itself_TT)[:, None]


def padded_width(lengths: Sequence[int], multiple: int) -> int:
    """Return the width of a batch (tokens, at least 1): its longest row, rounded up."""
    return -(-max(1, *lengths) // multiple) * multiple


def batch_trees(trees: Sequence[PackedTree], pad_id: int, *, multiple: int = 1) -> TreeBatch:
    """Pad the rows on the right to a multiple of tokens; padding has no targets."""
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
    """Return one row per thread, containing its whole path from the root.

    Every target of the packed row is learned in exactly one of the rows. A thread reads its
    parent's prefix again but does not learn it again. So a fork token learns the next token of the
    parent, and nothing in the child's row.
    """
    paths = _paths(packed)
    rows = []
    for path in paths:
        opened = max(
            (at for at, index in enumerate(path) if packed.token_ids[index] == tokens.child_id),
            default=0,
        )
        # Every thread but the root contains [Child], and the prompt contains none.
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
    """Return the row indices of each thread's whole path."""
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
