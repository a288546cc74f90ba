"""KV block reads of a step if rows that begin with the same blocks read them once.

A level is a pass over groups of rows. Each group reads once the blocks that all of its rows share,
except those that an earlier level has read. Each row reads the remaining blocks for itself.

- "family": one level, grouped as in the engine (`apar_core/attention/families.py`): the partition
  of rows into groups with a common prefix that saves most reads, across requests.
- "request": one level, which groups the rows of each request ("two levels", if the rows' remaining
  reads count as one).
- "nested": further levels, for rows of a request that share more blocks.
- "across": two levels: all rows with the same first block, then the rows of each request.

Only full blocks are shared: those whose tokens were all computed before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from apar_core.attention.families import group_rows
from apar_core.attention.settings import FamilySettings

Ints = NDArray[np.int64]
BlockIds = NDArray[np.int32]

Levels = Literal["family", "request", "nested", "across"]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Levels of grouping, and the thresholds below which rows are not grouped."""

    levels: Levels = "family"
    settings: FamilySettings = field(default_factory=FamilySettings)


@dataclass(frozen=True, slots=True)
class SharedReads:
    """Shared block reads of a step.

    saved_blocks: block reads of all rows minus those of the groups.
    passes: levels with at least one group.
    groups, rows: groups of all levels and their rows; a row counts once per level.
    """

    saved_blocks: int = 0
    passes: int = 0
    groups: int = 0
    rows: int = 0


NOTHING_SHARED = SharedReads()


class BlockTables:
    """Block tables of the rows of a batch, each in a slot of one array that grows as needed."""

    def __init__(self) -> None:
        self.ids: BlockIds = np.zeros((64, 64), np.int32)
        self.lengths: Ints = np.zeros(64, np.int64)
        self._free = list(range(64))

    def open(self) -> int:
        """Return an empty slot."""
        if not self._free:
            num_slots, columns = self.ids.shape
            self.ids = np.concatenate([self.ids, np.zeros((num_slots, columns), np.int32)])
            self.lengths = np.concatenate([self.lengths, np.zeros(num_slots, np.int64)])
            self._free = list(range(num_slots, 2 * num_slots))
        return self._free.pop()

    def close(self, slot: int) -> None:
        """Free a slot."""
        self.lengths[slot] = 0
        self._free.append(slot)

    def clear(self, slot: int) -> None:
        """Empty the table of a row that has lost its blocks."""
        self.lengths[slot] = 0

    def append(self, slot: int, block_ids: Sequence[int]) -> None:
        """Add blocks at the end of a row's table."""
        begin = int(self.lengths[slot])
        end = begin + len(block_ids)
        while end > self.ids.shape[1]:
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)], axis=1)
        self.ids[slot, begin:end] = block_ids
        self.lengths[slot] = end

    def count(self, slots: Sequence[int]) -> tuple[int, int]:
        """Return the number of blocks of these rows: summed over the rows, and distinct."""
        lengths = self.lengths[slots]
        width = int(lengths.max(initial=0))
        ids = self.ids[slots, :width][np.arange(width) < lengths[:, None]]
        return len(ids), len(np.unique(ids))


def shared_reads(
    tables: BlockIds, full_blocks: Ints, families: Ints, grouping: Grouping
) -> SharedReads:
    """Count the reads that a grouping saves in a step.

    tables: [rows, columns], the block tables of the rows that may be grouped, padded on the right.
    full_blocks: [rows], blocks of each row that hold only computed tokens. families: [rows], the
    number of each row's request.
    """
    settings = grouping.settings
    if not tables.size:
        return NOTHING_SHARED
    if grouping.levels == "family":
        return _as_the_engine(tables, full_blocks, settings)
    saved = passes = num_groups = num_rows = 0
    # Leading blocks of each row that a level has read.
    done = np.zeros(len(tables), np.int64)
    rows = np.flatnonzero(full_blocks >= settings.min_prefix_blocks)
    is_across = grouping.levels == "across"
    keys = tables[rows, 0].astype(np.int64) if is_across else families[rows]
    for level in range(2 if is_across else 1 << 30):
        rows, begins, sizes = _groups(rows, keys, settings.min_rows)
        if not len(rows):
            break
        common = _common_blocks(tables, full_blocks, rows, begins, sizes)
        gain = common - done[rows[begins]]
        taken = gain >= settings.min_prefix_blocks
        if taken.any():
            saved += int(((sizes - 1) * gain)[taken].sum())
            passes += 1
            num_groups += int(taken.sum())
            num_rows += int(sizes[taken].sum())
            done[rows] = np.where(taken.repeat(sizes), common.repeat(sizes), done[rows])
        if grouping.levels == "request":
            break
        parent = np.arange(len(sizes)).repeat(sizes)
        common = common.repeat(sizes)
        if is_across and level == 0:
            split = families[rows]
        else:
            # Rows stay together if they share one more block.
            goes_on = full_blocks[rows] > common
            rows, parent, common = rows[goes_on], parent[goes_on], common[goes_on]
            split = tables[rows, common].astype(np.int64)
        keys = parent * (int(split.max(initial=0)) + 1) + split
    if saved < settings.min_saved_blocks or not passes:
        return NOTHING_SHARED
    return SharedReads(saved, passes, num_groups, num_rows)


def _as_the_engine(tables: BlockIds, full_blocks: Ints, settings: FamilySettings) -> SharedReads:
    # With blocks of one token, a row has one token more than full blocks.
    lengths = torch.from_numpy((full_blocks + 1).astype(np.int32))
    found = group_rows(
        torch.from_numpy(np.ascontiguousarray(tables)),
        lengths,
        torch.ones_like(lengths),
        block_size=1,
        settings=settings,
    )
    if not found.num_families:
        return NOTHING_SHARED
    return SharedReads(found.num_saved_blocks, 1, found.num_families, found.num_rows)


def _groups(rows: Ints, keys: Ints, min_rows: int) -> tuple[Ints, Ints, Ints]:
    """Group rows by key, and drop groups of fewer than `min_rows`.

    Returns the rows, group after group, the index of each group's first row, and group sizes.
    """
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))[: len(keys)]
    sizes = np.diff(begins, append=len(keys))
    is_large = sizes >= min_rows
    rows = rows[order][is_large.repeat(sizes)]
    sizes = sizes[is_large]
    return rows, np.cumsum(sizes) - sizes, sizes


def _common_blocks(
    tables: BlockIds, full_blocks: Ints, rows: Ints, begins: Ints, sizes: Ints
) -> Ints:
    """Return the number of full blocks that all rows of each group begin with."""
    limits = np.minimum.reduceat(full_blocks[rows], begins)
    width = int(limits.max())
    first = tables[rows[begins], :width].repeat(sizes, axis=0)
    differs = tables[rows, :width] != first
    equal = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    common: Ints = np.minimum(np.minimum.reduceat(equal, begins), limits)
    return common
