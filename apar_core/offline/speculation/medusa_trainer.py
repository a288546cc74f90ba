"""Trains Medusa heads on the hidden states of a frozen model.

Dimensions: B rows, T tokens of the longest row, D hidden size, H heads, N learning tokens,
V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from apar_core.offline.speculation.medusa_heads import MedusaHeads
from apar_core.offline.speculation.medusa_targets import HEAD_TARGETS
from apar_core.offline.training.packing import IGNORED_TARGET
from apar_core.offline.training.tree_loss import hidden_states
from apar_core.offline.training.tree_trainer import Batch, TreeTrainer, tree_batch


def initial_heads(model: PreTrainedModel, *, num_heads: int, num_layers: int) -> MedusaHeads:
    """Return float32 heads that propose what the model's own output layer does."""
    output = model.get_output_embeddings()
    assert isinstance(output, Module)
    weight = output.weight
    assert isinstance(weight, Tensor)
    return MedusaHeads.like_lm_head(
        weight.detach().float(), num_heads=num_heads, num_layers=num_layers
    )


class MedusaTrainer(TreeTrainer):
    """The loss of a step is the mean over the targets of all heads."""

    def __init__(self, heads: MedusaHeads, frozen: PreTrainedModel, *args: Any, **kw: Any) -> None:
        super().__init__(heads, *args, **kw)
        self.frozen = frozen.eval().requires_grad_(False).to(self.args.device)

    def count_targets(self, batch: Batch) -> int:
        """Return the number of targets of all heads."""
        return int((batch[HEAD_TARGETS] != IGNORED_TARGET).sum())

    def summed_loss(self, model: Module, batch: Batch) -> Tensor:
        """Return the loss summed over the targets of all heads."""
        logits_HNV, targets_HN = self.proposals(model, batch)
        return cross_entropy(
            logits_HNV.flatten(0, 1).float(),
            targets_HN.flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="sum",
        )

    def proposals(self, heads: Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits [H, N, V] and targets [H, N] of the tokens that some head learns from."""
        targets_HBT = batch[HEAD_TARGETS]
        learning_BT = (targets_HBT != IGNORED_TARGET).any(0)
        with torch.no_grad():
            hidden_ND = hidden_states(self.frozen, tree_batch(batch))[learning_BT]
        # Not an inference tensor, and in the dtype of the heads.
        logits_HNV: Tensor = heads(hidden_ND.clone().float())
        return logits_HNV, targets_HBT[:, learning_BT]

    @torch.no_grad()
    def accuracy(self) -> list[float]:
        """Return, for each head, the share of validation targets that it puts first."""
        heads = self.accelerator.unwrap_model(self.model)
        assert isinstance(heads, MedusaHeads)
        num_heads = heads.settings.medusa_num_heads
        sums = torch.zeros(2, num_heads, dtype=torch.float64, device=self.args.device)
        for inputs in self.get_eval_dataloader():
            logits_HNV, targets_HN = self.proposals(heads, self._prepare_inputs(inputs))
            learned_HN = targets_HN != IGNORED_TARGET
            sums[0] += ((logits_HNV.argmax(-1) == targets_HN) & learned_HN).sum(1)
            sums[1] += learned_HN.sum(1)
        total = self.accelerator.reduce(sums, "sum")
        return [float(share) for share in total[0] / total[1].clamp(min=1)]
