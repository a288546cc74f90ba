"""The mask of tree attention in the form that a model's attention takes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from apar_core.errors import TrainingError
from apar_core.offline.training.packing import TreeBatch, tree_attention_mask

SDPA = "sdpa"
FLEX = "flex_attention"

# FlexAttention skips whole blocks of this many queries and keys.
FLEX_BLOCK_TOKENS = 128

# Fields that give each layer's attention, and the fields with the reach of limited kinds.
_LAYER_FIELDS = ("layer_types", "attention_layers")
_FULL = frozenset({"full_attention", "global"})
_REACH_FIELDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_function(batch: TreeBatch) -> MaskFunction:
    """Return FlexAttention's form of the mask: may this query read this key?"""
    segments_BT, visible_BSS = batch.segments_BT, batch.visible_BSS

    def reads(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        on_path = visible_BSS[row, segments_BT[row, query], segments_BT[row, key]]
        return (query == key) | ((query > key) & on_path)

    return reads


def attention_mask(model: PreTrainedModel, batch: TreeBatch) -> Tensor | BlockMask:
    """Return what the model takes as its attention mask.

    Raises TrainingError for an attention that takes no mask of this kind.
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
    """Name the layers that do not read all of a path of `num_tokens` tokens; None if all do.

    A tree mask replaces a model's own masks, so a sliding window would see everything. Recurrent
    layers take no mask, and read the details of siblings. A window that is at least as long as
    the path equals full attention.
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
    """Return how a kind of layer is limited on `num_tokens` tokens, or None where it is not."""
    if kind in _FULL:
        return None
    field = _REACH_FIELDS.get(kind)
    if field is None:
        return ""
    reach = getattr(config, field, None)
    if reach is not None and reach >= num_tokens:
        return None
    return f" with {field} {reach}, less than {num_tokens} tokens"
