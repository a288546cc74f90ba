"""Training of Medusa heads on the hidden states of a frozen model.

Dimensions: B rows, T tokens of the longest row, D hidden size, H heads, N tokens with a target, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from apar_core.offline.speculation.frozen_training import FrozenTrainer, Trained
from apar_core.offline.speculation.medusa_heads import MedusaHeads, save_medusa_heads
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, next_indices
from apar_core.offline.training.recipe import MedusaRecipe, TinySettings
from apar_core.offline.training.tree_forward import hidden_states
from apar_core.offline.training.tree_trainer import Batch, TreeCollator, tree_batch

HEAD_TARGETS = "head_targets_HBT"


def head_targets(packed: PackedTree, num_heads: int) -> list[list[int]]:
    """Return the targets of each head: the token k + 2 places ahead in the same thread for head k.

    So a token before [Fork] proposes the continuation of its own thread, and [Child], which the
    server injects, is never proposed. Of the prompt, only the last token has targets. The last
    target is the end of the thread.
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


def initial_heads(model: PreTrainedModel, recipe: MedusaRecipe) -> MedusaHeads:
    """Return float32 heads that start with the predictions of the model's output layer."""
    output = model.get_output_embeddings()
    assert isinstance(output, Module)
    weight = output.weight
    assert isinstance(weight, Tensor)
    return MedusaHeads.like_lm_head(
        weight.detach().float(),
        num_heads=recipe.num_heads,
        num_layers=recipe.num_layers,
        original_lm_head=recipe.original_lm_head,
    )


class MedusaTrainer(FrozenTrainer):
    """Trainer whose loss is the mean over the targets of all heads."""

    def count_targets(self, batch: Batch) -> int:
        """Return the number of targets of all heads."""
        return int((batch[HEAD_TARGETS] != IGNORED_TARGET).sum())

    def summed_loss(self, model: Module, batch: Batch) -> Tensor:
        """Return the loss summed over the targets of all heads."""
        targets_HBT = batch[HEAD_TARGETS]
        learning_BT = (targets_HBT != IGNORED_TARGET).any(0)
        with torch.no_grad():
            hidden_ND = hidden_states(self.frozen, tree_batch(batch))[learning_BT]
        # A copy that is not an inference tensor, in the dtype of the heads.
        output_layer = self.frozen.get_output_embeddings()
        logits_HNV: Tensor = model(hidden_ND.clone().float(), output_layer)
        return cross_entropy(
            logits_HNV.flatten(0, 1).float(),
            targets_HBT[:, learning_BT].flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="sum",
        )


def _save(heads: MedusaHeads, folder: Path) -> None:
    save_medusa_heads(heads.bfloat16(), folder)


MEDUSA_HEADS = Trained(
    name="Medusa heads",
    stream="medusa",
    build=initial_heads,
    collator=lambda trees, recipe: MedusaCollator(trees, recipe.num_heads),
    trainer=MedusaTrainer,
    save=_save,
    recipe=MedusaRecipe,
    tiny_settings=TinySettings[MedusaRecipe],
)
"""Medusa heads, for `train_beside`."""
