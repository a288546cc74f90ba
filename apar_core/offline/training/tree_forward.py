"""Forward passes over packed trees: attention mask, hidden states, logits and loss.

Works with any causal language model of transformers that has full attention.

Dimensions: B rows, T tokens of the longest row, D hidden size, N targets of the batch,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import cross_entropy
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from apar_core.errors import TrainingError
from apar_core.offline.training.packing import IGNORED_TARGET, TreeBatch, tree_attention_mask

SDPA = "sdpa"
FLEX = "flex_attention"

FLEX_BLOCK_TOKENS = 128
"""Queries and keys per block that FlexAttention skips or computes as a whole."""

# Configuration fields with each layer's kind of attention, and with the reach of limited kinds.
_LAYER_FIELDS = ("layer_types", "attention_layers")
_FULL = frozenset({"full_attention", "global"})
_REACH_FIELDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_function(batch: TreeBatch) -> MaskFunction:
    """Return the mask as FlexAttention takes it: a predicate of row, head, query and key."""
    segments_BT, visible_BSS = batch.segments_BT, batch.visible_BSS

    def reads(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        on_path = visible_BSS[row, segments_BT[row, query], segments_BT[row, key]]
        return (query == key) | ((query > key) & on_path)

    return reads


def attention_mask(model: PreTrainedModel, batch: TreeBatch) -> Tensor | BlockMask:
    """Return the attention mask in the form that the model takes.

    Raises TrainingError for attention implementations that do not support tree masks.
    """
    implementation = model.config._attn_implementation
    if implementation == FLEX:
        num_rows, num_tokens = batch.token_ids_BT.shape
        return create_block_mask(
            mask_function(batch),
            B=num_rows,
            H=None,
            Q_LEN=num_tokens,
            KV_LEN=num_tokens,
            device=batch.token_ids_BT.device,
            BLOCK_SIZE=FLEX_BLOCK_TOKENS,
        )
    if implementation == SDPA:
        return tree_attention_mask(batch)
    raise TrainingError(
        f"tree attention needs {SDPA} or {FLEX}; the model has {implementation!r} attention"
    )


def limited_attention(config: PreTrainedConfig, num_tokens: int) -> str | None:
    """Describe the layers that cannot read a whole path of `num_tokens` tokens; None if all can.

    A tree mask replaces a model's own masks, so a sliding window would be ignored. Recurrent layers
    take no mask and would read the details of siblings. A window at least as long as the path
    equals full attention.
    """
    text = config.get_text_config()
    for field in _LAYER_FIELDS:
        kinds = getattr(text, field, None)
        if kinds:
            limits = {kind: _limit(text, kind, num_tokens) for kind in dict.fromkeys(kinds)}
            found = [
                f"{kinds.count(kind)} of {len(kinds)} {kind}{limit}"
                for kind, limit in limits.items()
                if limit is not None
            ]
            return f"{field}: {', '.join(found)}" if found else None
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if getattr(model_class, "_is_stateful", False):
        return f"model_type: {text.model_type} has recurrent layers"
    if getattr(text, "sliding_window", None) is None:
        return None
    limit = _limit(text, "sliding_attention", num_tokens)
    return None if limit is None else f"sliding_attention in every layer{limit}"


def _limit(config: PreTrainedConfig, kind: str, num_tokens: int) -> str | None:
    """Describe the limit of a kind of layer on `num_tokens` tokens; None without a limit."""
    if kind in _FULL:
        return None
    field = _REACH_FIELDS.get(kind)
    if field is None:
        return ""
    reach = getattr(config, field, None)
    if reach is not None and reach >= num_tokens:
        return None
    return f" with {field} {reach}, less than {num_tokens} tokens"


def learned_logits(model: Module, batch: TreeBatch, configured: PreTrainedModel) -> Tensor:
    """Return the logits [N, V] of all tokens with a target, row by row.

    `configured` is the model itself if `model` wraps it, for example for data parallelism.
    """
    learned_BT = batch.targets_BT != IGNORED_TARGET
    with before_output_layer(configured, lambda hidden_BTD: hidden_BTD[learned_BT]):
        logits: Tensor = model(
            input_ids=batch.token_ids_BT,
            position_ids=batch.positions_BT,
            attention_mask=attention_mask(configured, batch),
            use_cache=False,
        ).logits
    return logits if logits.ndim == 2 else logits[learned_BT]


def hidden_states(model: PreTrainedModel, batch: TreeBatch) -> Tensor:
    """Return the input of the model's output layer, [B, T, D], without computing logits."""
    read: list[Tensor] = []

    def keep(hidden_BTD: Tensor) -> Tensor:
        read.append(hidden_BTD)
        return hidden_BTD[:, :0]

    with before_output_layer(model, keep):
        model(
            input_ids=batch.token_ids_BT,
            position_ids=batch.positions_BT,
            attention_mask=attention_mask(model, batch),
            use_cache=False,
        )
    return read[0]


@contextmanager
def before_output_layer(
    model: PreTrainedModel, change: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Change the input of the output layer, since logits are the largest tensor of a step."""

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
    """Return the loss summed over all targets of the batch (scalar)."""
    targets_N = batch.targets_BT[batch.targets_BT != IGNORED_TARGET]
    logits_NV = learned_logits(model, batch, configured)
    return cross_entropy(logits_NV.float(), targets_N, reduction="sum")
