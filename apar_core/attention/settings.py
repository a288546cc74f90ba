"""Grouping of a step's rows into families. The defaults are predicted, not measured on a GPU.

A group of rows is read in two passes, over the shared blocks and over the rest of each row, whose
results are merged. `cluster/lab/virtual/shared_reads.py` counts what that saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

PASS_BYTES = 64 * 2**20
"""KV cache that a GPU reads in one layer while it could start and merge a second pass.

That is 25 us at 2.7 TB/s: between an A100 (42 MB) and an H200 (119 MB)."""

FURTHER_THREAD_COST = 0.6
"""Time that a thread adds to a step beside others of its request, over that of a request's first.

Predicted for Llama-7B with 220 rows a step: 0.55 on an A100, 0.53 on an H100. Models with fewer KV
bytes per token are nearer to 1."""


@dataclass(frozen=True, slots=True)
class FamilySettings:
    """The least that a group has to save. Rows of other groups are read one by one, as without it.

    min_rows: rows of a group.
    min_prefix_blocks: full KV blocks that all rows of a group begin with.
    min_saved_blocks: block reads that all groups of a step save together, below which no row of the
        step is grouped. It pays for the second pass, whose launch takes as long for one group as
        for a hundred.
    """

    min_rows: int = 2
    min_prefix_blocks: int = 4
    min_saved_blocks: int = 0

    def __post_init__(self) -> None:
        for name, least in (("min_rows", 2), ("min_prefix_blocks", 1), ("min_saved_blocks", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} must be {least} or more, not {value}")

    @classmethod
    def for_blocks(cls, block_layer_bytes: int) -> Self:
        """Return the settings for KV blocks of so many bytes in one layer and on one GPU."""
        return cls(min_saved_blocks=-(-PASS_BYTES // block_layer_bytes))
