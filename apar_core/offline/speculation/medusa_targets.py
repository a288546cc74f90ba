"""What Medusa heads learn of a packed tree.

Dimensions: B rows, T tokens of the longest row, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, next_indices
from apar_core.offline.training.tree_trainer import TreeCollator

HEAD_TARGETS = "head_targets_HBT"


def head_targets(packed: PackedTree, num_heads: int) -> list[list[int]]:
    """Return, for each head, the token that each token of the row has to propose.

    Head k, counted from 0, proposes the token k + 2 places on in the same thread. So a token before
    [Fork] proposes what its own thread goes on with, and [Child], which the server injects, is
    never proposed. No token of the prompt but the last learns, and the end of a thread is the last
    thing proposed.
    """
    following = next_indices(packed)
    by_head: list[list[int]] = []
    wanted = list(packed.targets)
    for _ in range(num_heads):
        wanted = [
            IGNORED_TARGET
            if target == IGNORED_TARGET or (after := following[index]) is None
            else wanted[after]
            for index, target in enumerate(packed.targets)
        ]
        by_head.append(wanted)
    return by_head


@dataclass(frozen=True, slots=True)
class MedusaCollator:
    """Adds the heads' targets to a padded micro-batch."""

    trees: TreeCollator
    num_heads: int

    def __call__(self, trees: Sequence[PackedTree]) -> dict[str, Tensor]:
        """Return one micro-batch."""
        batch = self.trees(trees)
        shape = (self.num_heads, *batch["targets_BT"].shape)
        targets_HBT = torch.full(shape, IGNORED_TARGET)
        for row, tree in enumerate(trees):
            length = len(tree.token_ids)
            targets_HBT[:, row, :length] = torch.tensor(head_targets(tree, self.num_heads))
        return batch | {HEAD_TARGETS: targets_HBT}
