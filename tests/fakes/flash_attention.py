"""FlashAttention's function for paged sequences in torch, for machines without a GPU.

It has the signature of vLLM's `flash_attn_varlen_func`, as far as it is used, and refuses
everything else.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
    return_softmax_lse: bool,
    fa_version: int,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as FlashAttention does to paged sequences; also checks its requirements."""
    starts = cu_seqlens_q.tolist()
    assert return_softmax_lse
    assert fa_version in (2, 3)
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert len(seqused_k) == len(block_table) == len(starts) - 1
    assert block_table.stride(-1) == 1
    assert starts[-1] == len(q)
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[1], len(q))
    for row, length in enumerate(seqused_k.tolist()):
        first, end = starts[row : row + 2]
        assert 0 < end - first <= max_seqlen_q
        assert 0 < length <= max_seqlen_k
        blocks = block_table[row, : -(-length // k.shape[1])].long()
        keys, values = k[blocks].flatten(0, 1)[:length], v[blocks].flatten(0, 1)[:length]
        out[first:end], lse[:, first:end] = plain_attention(
            q[first:end], keys, values, softmax_scale, causal=causal
        )
    return out, lse


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return output [Q, H, D] and log-sum-exp [H, Q] in float64."""
    repeats = query.shape[1] // keys.shape[1]
    keys, values = (
        keys.double().repeat_interleave(repeats, 1),
        values.double().repeat_interleave(repeats, 1),
    )
    scores = torch.einsum("qhd,thd->hqt", query.double(), keys) * scale
    if causal:
        num_queries, num_keys = scores.shape[1:]
        hidden = torch.ones(num_queries, num_keys).triu(num_keys - num_queries + 1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    output = torch.einsum("hqt,thd->qhd", scores.softmax(-1), values)
    return output.to(query.dtype), scores.logsumexp(-1).float()
