"""Grouping of a step's rows into families that share leading KV blocks.

A family is a set of rows with a common prefix of full blocks. Attention reads this prefix once for
the whole family, and the rest of each row separately. The partition into families saves the most
block reads that any partition with one prefix per row can save.

Rows are grouped by block ids, not by thread ids. If two rows list the same block at the same
position, after equal blocks, it holds the same tokens for both. The scheduler therefore need not
report which threads are siblings. Requests with the same prompt (`n > 1`) or system prompt are
found in the same way. A preempted thread that resumes is grouped by its new blocks.

Letters: R rows of the step, B columns of the block table, F families, M rows in families.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from apar_core.attention.settings import FamilySettings

    Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Families:
    """The families of one step. All tensors are int32 and on one device.

    Every family has at least `FamilySettings.min_rows` rows, and a row is in at most one family.
    The prefix ends before the row's last token, so the rest of a row is never empty.
    """

    rows: torch.Tensor
    """[M] row indices, family by family."""
    starts: torch.Tensor
    """[F + 1] family f consists of `rows[starts[f]:starts[f + 1]]`."""
    prefix_blocks: torch.Tensor
    """[F] number of full leading blocks that the rows of a family share."""
    row_prefix_blocks: torch.Tensor
    """[R] the same for each row of the step; 0 for rows in no family."""

    @classmethod
    def smallest(cls, device: torch.device) -> Families:
        """Return one family of two rows that share one block, for compiling kernels."""

        def ints(*numbers: int) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        return cls(ints(0, 1), ints(0, 2), ints(1), ints(1, 1))

    @property
    def num_rows(self) -> int:
        """Number of rows in families (M)."""
        return self.rows.shape[0]

    @property
    def num_families(self) -> int:
        """Number of families (F)."""
        return self.prefix_blocks.shape[0]

    @property
    def num_saved_blocks(self) -> int:
        """Number of block reads saved; requires families on the host."""
        return int(self.row_prefix_blocks.sum()) - int(self.prefix_blocks.sum())


def group_rows(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    *,
    block_size: int,
    settings: FamilySettings,
) -> Families:
    """Group the rows of a step by the full blocks that they share; all tensors are on the host.

    `block_table` is int32 [R, B]. `seq_lens` [R] counts each row's tokens, this step's included;
    `query_lens` [R] counts only this step's. Only rows with exactly one query can be in a family,
    so prefill chunks, drafts and padding are not. Table entries after a row's last computed full
    block are not read. Rows that start with block 0, vLLM's null block, are dummies and in no
    family. A step that would save fewer than `min_saved_blocks` block reads has no families.
    """
    table = block_table.numpy()
    num_blocks = (seq_lens.numpy() - 1) // block_size
    num_blocks[(query_lens.numpy() != 1) | (table[:, 0] == 0)] = 0
    rows, starts, prefix_blocks, row_prefix_blocks = _compiled()(
        table,
        num_blocks.astype(np.int32),
        settings.min_rows,
        max(settings.min_prefix_blocks, 1),
    )
    families = Families(
        rows=torch.from_numpy(rows),
        starts=torch.from_numpy(starts),
        prefix_blocks=torch.from_numpy(prefix_blocks),
        row_prefix_blocks=torch.from_numpy(row_prefix_blocks),
    )
    if families.num_saved_blocks < settings.min_saved_blocks:
        return no_families(len(num_blocks))
    return families


def no_families(num_rows: int) -> Families:
    """Return an empty set of families: all rows are read one by one."""
    return Families(
        rows=torch.empty(0, dtype=torch.int32),
        starts=torch.zeros(1, dtype=torch.int32),
        prefix_blocks=torch.empty(0, dtype=torch.int32),
        row_prefix_blocks=torch.zeros(num_rows, dtype=torch.int32),
    )


@cache
def _compiled() -> Callable[[Ints, Ints, int, int], tuple[Ints, Ints, Ints, Ints]]:
    """Compile `partition` on first use in a process, which takes about two seconds."""
    import numba

    compiled: Any = numba.njit(nogil=True)(partition)
    return compiled  # type: ignore[no-any-return]


def partition(
    table_RB: Ints, num_blocks_R: Ints, min_rows: int, min_prefix_blocks: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (rows, starts, prefix_blocks, row_prefix_blocks) of the families that save most.

    The rows form a prefix tree, whose nodes are the longest common prefixes of two or more rows.
    A row reads the prefix of its deepest chosen ancestor for free, and each chosen node is read
    once. The best choice is computed from the leaves up, for each possible chosen ancestor.
    Written for numba: plain loops over arrays.
    """
    num_rows = num_blocks_R.shape[0]
    order = np.empty(num_rows, np.int32)
    size = 0
    for row in range(num_rows):
        if num_blocks_R[row] >= min_prefix_blocks:
            order[size] = row
            size += 1

    # Nodes, parents before children. `order[first:end]` holds the rows below a node.
    depth = np.empty(size + 1, np.int32)
    parent = np.empty(size + 1, np.int32)
    level = np.empty(size + 1, np.int32)
    num_direct = np.zeros(size + 1, np.int32)
    node_of_row = np.full(num_rows, -1, np.int32)
    num_nodes = 0
    max_level = 0
    # Groups of rows that share their first `shared` blocks: first, end, shared, parent node.
    stack = np.empty((size + 1, 4), np.int32)
    stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = 0, size, 0, -1
    num_waiting = 1 if size > 1 else 0
    while num_waiting > 0:
        num_waiting -= 1
        first, end = stack[num_waiting, 0], stack[num_waiting, 1]
        shared, above = stack[num_waiting, 2], stack[num_waiting, 3]
        leader = order[first]
        common = num_blocks_R[leader]
        for place in range(first + 1, end):
            row = order[place]
            common = min(common, num_blocks_R[row])
            column = shared
            while column < common and table_RB[row, column] == table_RB[leader, column]:
                column += 1
            common = column
        node = above
        if common >= min_prefix_blocks:
            node = num_nodes
            num_nodes += 1
            depth[node] = common
            parent[node] = above
            level[node] = 1 if above < 0 else level[above] + 1
            max_level = max(max_level, level[node])
        # Sort the rows that continue by their next block; the others end at this node.
        keys = np.full(end - first, -1, np.int64)
        for place in range(first, end):
            if num_blocks_R[order[place]] > common:
                keys[place - first] = table_RB[order[place], common]
        by_key = np.argsort(keys)
        ordered = order[first:end][by_key]
        order[first:end] = ordered
        begin = 0
        while begin < end - first:
            stop = begin + 1
            key = keys[by_key[begin]]
            while stop < end - first and keys[by_key[stop]] == key:
                stop += 1
            if key >= 0 and stop - begin > 1:
                stack[num_waiting, 0], stack[num_waiting, 1] = first + begin, first + stop
                stack[num_waiting, 2], stack[num_waiting, 3] = common + 1, node
                num_waiting += 1
            elif node >= 0:
                for place in range(begin, stop):
                    node_of_row[ordered[place]] = node
                    num_direct[node] += 1
            begin = stop

    # `saved` of node v and level l: most reads saved at and below v if its nearest chosen ancestor
    # is on level l (0: none). `sums` adds it up over the children of a node. `if_chosen` is what
    # choosing the node itself saves.
    sums = np.zeros((num_nodes, max_level + 1), np.int64)
    if_chosen = np.empty(num_nodes, np.int64)
    for node in range(num_nodes - 1, -1, -1):
        own_level = level[node]
        if_chosen[node] = sums[node, own_level] + (num_direct[node] - 1) * depth[node]
        above = parent[node]
        ancestor = above
        for ancestor_level in range(own_level - 1, -1, -1):
            ancestor_depth = 0 if ancestor_level == 0 else depth[ancestor]
            saved = max(
                if_chosen[node], sums[node, ancestor_level] + num_direct[node] * ancestor_depth
            )
            if above >= 0:
                sums[above, ancestor_level] += saved
            if ancestor_level > 0:
                ancestor = parent[ancestor]
        # In `sums`, the column of a node's own level stands for choosing the node itself.

    # From the root down: the chosen nodes, and the number of rows that read each.
    chosen = np.empty(num_nodes, np.int32)
    num_read = np.zeros(num_nodes, np.int32)
    for node in range(num_nodes):
        above = parent[node]
        nearest = -1 if above < 0 else chosen[above]
        nearest_level = 0 if nearest < 0 else level[nearest]
        nearest_depth = 0 if nearest < 0 else depth[nearest]
        otherwise = sums[node, nearest_level] + num_direct[node] * nearest_depth
        chosen[node] = node if if_chosen[node] > otherwise else nearest
        if chosen[node] >= 0:
            num_read[chosen[node]] += num_direct[node]

    family_of_node = np.full(num_nodes, -1, np.int32)
    num_families = 0
    for node in range(num_nodes):
        if num_read[node] >= max(min_rows, 2):
            family_of_node[node] = num_families
            num_families += 1
    starts = np.zeros(num_families + 1, np.int32)
    prefix_blocks = np.empty(num_families, np.int32)
    for node in range(num_nodes):
        family = family_of_node[node]
        if family >= 0:
            starts[family + 1] = num_read[node]
            prefix_blocks[family] = depth[node]
    for family in range(num_families):
        starts[family + 1] += starts[family]
    rows = np.empty(starts[num_families], np.int32)
    row_prefix_blocks = np.zeros(num_rows, np.int32)
    filled = starts.copy()
    for row in range(num_rows):
        node = node_of_row[row]
        if node >= 0 and chosen[node] >= 0:
            family = family_of_node[chosen[node]]
            if family >= 0:
                rows[filled[family]] = row
                filled[family] += 1
                row_prefix_blocks[row] = prefix_blocks[family]
    return rows, starts, prefix_blocks, row_prefix_blocks
