"""Sampling on CPUs: top-p without sorting the vocabulary, and parameters of drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apar_core.vllm_names import apply_top_k_only, apply_top_k_top_p_pytorch

_LIKELIEST = 512
"""Number of tokens among which the nucleus of most rows lies."""


def keep_top_k_top_p(logits_NV: Tensor, k: Tensor | None, p: Tensor | None, **named: Any) -> Tensor:
    """Set the logits outside top-k and top-p to minus infinity, in place, as vLLM's function does.

    vLLM sorts the vocabulary, which takes half of a step of 128 rows of SmolLM2-135M. The nucleus
    of most rows lies among a few hundred tokens, which are found without sorting the others. Rows
    with another nucleus are sorted. Of tokens of equal probability at the edge, all are kept.

    There may be no rows: vLLM also calls it for the drafts of a step without drafts, where its own
    function fails if a request has a `top_k` (vLLM 0.32).
    """
    if len(logits_NV) == 0:
        return logits_NV
    if p is None:
        return apply_top_k_top_p_pytorch(logits_NV, k, p, **named)
    num_likeliest = min(_LIKELIEST, logits_NV.shape[1])
    if k is not None:
        logits_NV = apply_top_k_only(logits_NV, k)
    top_NL = logits_NV.topk(num_likeliest, dim=1).values
    probabilities_NL = (top_NL - logits_NV.logsumexp(dim=1, keepdim=True)).exp_()
    # A token is in the nucleus if those before it have less than p together.
    before_NL = probabilities_NL.cumsum(dim=1).sub_(probabilities_NL)
    in_nucleus_NL = before_NL < p.unsqueeze(1)
    in_nucleus_NL[:, 0] = True
    edge_N1 = top_NL.gather(1, in_nucleus_NL.sum(dim=1, keepdim=True) - 1)
    reaches_further_N = in_nucleus_NL[:, -1] & (num_likeliest < logits_NV.shape[1])
    # Top-p of 1 keeps everything, although the sum of float32 reaches 1 before the end.
    keeps_N = reaches_further_N | (p >= 1)
    edge_N1.masked_fill_(keeps_N.unsqueeze(1), -float("inf"))
    logits_NV.masked_fill_(logits_NV < edge_N1, -float("inf"))
    rows = (reaches_further_N & (p < 1)).nonzero().flatten()
    if len(rows) > 0:
        logits_NV[rows] = apply_top_k_top_p_pytorch(logits_NV[rows], None, p[rows], **named)
    return logits_NV


def repeat_for_drafts(
    values_N: Tensor,
    cu_num_tokens_N: Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """Return each thread's value for each of its drafts, as vLLM's `expand_batch_to_tokens`.

    In vLLM 0.32 the CPU kernel behind that function writes into a copy of its result. Drafts would
    be sampled with whatever the memory held.
    """
    counts_N = cu_num_tokens_N.diff(prepend=cu_num_tokens_N.new_zeros(1))
    replaced_N = torch.where(values_N == replace_from, replace_to, values_N)
    return replaced_N.repeat_interleave(counts_N, output_size=num_tokens)
