"""The mask of tree attention in the form that a model's attention takes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

from apar_core.errors import TrainingError
from apar_core.training.packing import TreeBatch, tree_attention_mask

SDPA = "sdpa"
FLEX = "flex_attention"

# FlexAttention skips whole blocks of this many queries and keys.
FLEX_BLOCK_TOKENS = 128

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
