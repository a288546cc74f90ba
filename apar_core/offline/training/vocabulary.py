"""Gives a model its two control tokens."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from apar_core.errors import TrainingError
from apar_core.formats.control_tokens import (
    SPELLINGS,
    ControlTokens,
    TreeTokens,
    find_control_tokens,
)
from apar_core.offline.training.chat_format import turn_end_id

logger = logging.getLogger(__name__)

# Of the spread of the other rows: enough to tell the two tokens apart, too little to matter.
_NOISE_SHARE = 0.1


def add_control_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, multiple: int, seed: int
) -> ControlTokens:
    """Make sure that tokenizer and model have the control tokens; return them.

    A checkpoint that has them is kept as it is. New rows are the mean of all rows plus noise of a
    tenth of their spread. With the mean as its output row a new token starts about as likely as an
    average one, so the model's other predictions hardly change; a row drawn at random can win
    every argmax. The noise tells [Fork] from [Child].
    """
    are_new = find_control_tokens(tokenizer.get_vocab()) is None
    control = with_control_tokens(tokenizer)
    if are_new:
        _grow(model, len(tokenizer), multiple)
        _initialise_rows(model, control, seed)
        extra = {"fork": control.fork_id, "child": control.child_id}
        logger.info("control tokens added", extra=extra)
    elif _grow(model, max(control.fork_id, control.child_id) + 1, multiple):
        _initialise_rows(model, control, seed)
    return control


def with_control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Add the control tokens to a tokenizer that has none; return them."""
    known = find_control_tokens(tokenizer.get_vocab())
    if known is not None:
        return known
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(SPELLINGS[0])}, replace_extra_special_tokens=False
    )
    known = find_control_tokens(tokenizer.get_vocab())
    if known is None:
        raise TrainingError(f"the tokenizer does not take the tokens {SPELLINGS[0]}")
    return known


def _grow(model: PreTrainedModel, num_tokens: int, multiple: int) -> bool:
    """Enlarge the embeddings if they have fewer rows; spare rows are never taken away."""
    if len(_input_rows(model)) >= num_tokens:
        return False
    padded = math.ceil(num_tokens / multiple) * multiple
    model.resize_token_embeddings(padded, mean_resizing=False)
    return True


def _input_rows(model: PreTrainedModel) -> Tensor:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


@torch.no_grad()
def _initialise_rows(model: PreTrainedModel, control: ControlTokens, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new = {control.fork_id, control.child_id}
    inputs = _input_rows(model)
    head = model.get_output_embeddings()
    matrices = [inputs]
    if head is not None and head.weight is not inputs:
        matrices.append(head.weight)
        bias = getattr(head, "bias", None)
        if bias is not None:
            bias[sorted(new)] = bias[: min(new)].mean()
    for matrix_VD in matrices:
        # Rows from the first new one on are new or padding.
        old_VD = matrix_VD[: min(new)].float()
        mean_D, spread_D = old_VD.mean(0), old_VD.std(0)
        matrix_VD[min(new) :] = mean_D.to(matrix_VD.dtype)
        for token_id in sorted(new):
            noise_D = torch.randn(mean_D.shape, generator=generator).to(mean_D)
            row_D = mean_D + _NOISE_SHARE * spread_D * noise_D
            matrix_VD[token_id] = row_D.to(matrix_VD.dtype)


def tree_tokens(tokenizer: PreTrainedTokenizerBase) -> TreeTokens:
    """Return the ids that shape a tree in this tokenizer.

    A thread ends with the token that ends an assistant's turn. Raises TrainingError if there are no
    control tokens or no such token.
    """
    control = find_control_tokens(tokenizer.get_vocab())
    if control is None:
        raise TrainingError(
            "the tokenizer has no control tokens: train the model with `apar train`"
        )
    return TreeTokens(control.fork_id, control.child_id, turn_end_id(tokenizer))


def stop_at(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end_id: int) -> None:
    """Make the saved model stop at `end_id`, beside the tokens that ended its texts before."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = {*configured} if isinstance(configured, list) else {configured}
    if model.generation_config is not None and end_id not in ids | {tokenizer.eos_token_id}:
        ids = {each for each in (*ids, tokenizer.eos_token_id, end_id) if each is not None}
        model.generation_config.eos_token_id = sorted(ids)
