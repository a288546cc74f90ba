"""Thresholds for grouping rows into families; the defaults are predicted, not measured on a GPU.

A group of rows is read in two passes: over the shared blocks, and over the rest of each row. Their
results are merged. `cluster/lab/virtual/shared_reads.py` counts the block reads that this saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

PASS_BYTES = 64 * 2**20
"""Bytes of KV cache, in one layer, that take as long to read as a second pass to launch and merge.

That is 25 us at 2.7 TB/s: between an A100 (42 MB) and an H200 (119 MB)."""

FURTHER_THREAD_COST = 0.6
"""Step time that a further thread of a request adds, relative to the request's first thread.

Predicted for Llama-7B with 220 rows a step: 0.55 on an A100, 0.53 on an H100. Models with fewer KV
bytes per token are closer to 1."""


@dataclass(frozen=True, slots=True)
class FamilySettings:
    """Minimum size of a group, and minimum savings of a step; other rows are read one by one.

    min_rows: rows of a group.
    min_prefix_blocks: full KV blocks that all rows of a group begin with.
    min_saved_blocks: block reads that all groups of a step save together. If they save fewer, no
        row of the step is grouped. This pays for the second pass, whose launch takes as long for
        one group as for a hundred.
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
        """Return the settings for KV blocks of `block_layer_bytes` bytes per layer and GPU."""
        return cls(min_saved_blocks=-(-PASS_BYTES // block_layer_bytes))
