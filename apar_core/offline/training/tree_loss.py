"""The loss of packed trees, for any causal language model of transformers.

Dimensions: B rows, T tokens of the longest row, D hidden size, N targets of the batch,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from apar_core.offline.training.packing import IGNORED_TARGET, TreeBatch
from apar_core.offline.training.tree_attention import attention_mask


def learned_logits(model: Module, batch: TreeBatch, configured: PreTrainedModel) -> Tensor:
    """Return the logits [N, V] of the tokens that have a target, row by row.

    `configured` is the model itself where `model` wraps it (for data parallelism, say).
    """
    learned_BT = batch.targets_BT != IGNORED_TARGET
    with _before_output_layer(configured, lambda hidden_BTD: hidden_BTD[learned_BT]):
        logits: Tensor = model(
            input_ids=batch.token_ids_BT,
            position_ids=batch.positions_BT,
            attention_mask=attention_mask(configured, batch),
            use_cache=False,
        ).logits
    return logits if logits.ndim == 2 else logits[learned_BT]


def hidden_states(model: PreTrainedModel, batch: TreeBatch) -> Tensor:
    """Return what the model's output layer reads, [B, T, D], without computing any logits."""
    read: list[Tensor] = []

    def keep(hidden_BTD: Tensor) -> Tensor:
        read.append(hidden_BTD)
        return hidden_BTD[:, :0]

    with _before_output_layer(model, keep):
        model(
            input_ids=batch.token_ids_BT,
            position_ids=batch.positions_BT,
            attention_mask=attention_mask(model, batch),
            use_cache=False,
        )
    return read[0]


@contextmanager
def _before_output_layer(
    model: PreTrainedModel, change: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Let the output layer read something else: logits are the largest tensor of a step."""

    def select(module: Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(inputs[0]), *inputs[1:])

    head = model.get_output_embeddings()
    assert isinstance(head, Module)
    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def summed_tree_loss(model: Module, batch: TreeBatch, configured: PreTrainedModel) -> Tensor:
    """Return the loss summed over all targets of the batch (a scalar)."""
    targets_N = batch.targets_BT[batch.targets_BT != IGNORED_TARGET]
    logits_NV = learned_logits(model, batch, configured)
    return cross_entropy(logits_NV.float(), targets_N, reduction="sum")


def tree_loss(model: PreTrainedModel, batch: TreeBatch) -> Tensor:
    """Return the mean loss over all targets of the batch (a scalar)."""
    return summed_tree_loss(model, batch, model) / (batch.targets_BT != IGNORED_TARGET).sum()
