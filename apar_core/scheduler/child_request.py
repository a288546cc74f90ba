"""Builds the engine request of a thread from its parent's."""

from __future__ import annotations

import math
from typing import Any

from vllm.v1.request import Request

from apar_core.errors import TreeError
from apar_core.fork_parameters import EXTRA_ARG, child_seed


def build_child_request(
    parent: Request,
    *,
    request_id: str,
    ordinal: int,
    fork_index: int,
    child_id: int,
    max_tokens: int,
) -> Request:
    """A request that continues the parent's first `fork_index + 1` tokens after a child token.

    `fork_index` is the position of the fork token in the parent's sequence, `ordinal` the fork's
    number within the parent, `max_tokens` what the request's budget leaves.
    """
    if parent.sampling_params is None:
        raise TreeError(f"request {parent.request_id!r} forked, but does not sample tokens")
    sampling_params = parent.sampling_params.clone()
    sampling_params.max_tokens = max_tokens
    sampling_params.min_tokens = 0
    # Whatever was asked of the prompt, its root thread answers.
    sampling_params.prompt_logprobs = None
    sampling_params.prompt_logprob_token_ids = None
    sampling_params.skip_reading_prefix_cache = False
    sampling_params.seed = child_seed(sampling_params.seed, ordinal)
    sampling_params.extra_args = _extra_args(sampling_params.extra_args, ordinal)
    child = Request(
        request_id=request_id,
        prompt_token_ids=[*parent.all_token_ids[: fork_index + 1], child_id],
        sampling_params=sampling_params,
        pooling_params=None,
        client_index=parent.client_index,
        # The next larger time: behind its parent, ahead of every later request.
        arrival_time=math.nextafter(parent.arrival_time, math.inf),
        mm_features=parent.mm_features,
        lora_request=parent.lora_request,
        cache_salt=parent.cache_salt,
        priority=parent.priority,
    )
    _inherit_block_hashes(parent, child, num_shared_tokens=fork_index + 1)
    return child


def _extra_args(parent_extra_args: dict[str, Any] | None, ordinal: int) -> dict[str, Any]:
    extra_args = parent_extra_args or {}
    values = extra_args[EXTRA_ARG]
    return {
        **extra_args,
        EXTRA_ARG: {**values, "thread_path": (*values["thread_path"], ordinal)},
    }


def _inherit_block_hashes(parent: Request, child: Request, *, num_shared_tokens: int) -> None:
    """Take over the hashes of the shared blocks, which would cost time per prompt token."""
    hasher = parent._block_hasher
    if hasher is None:
        return
    # Hashes cover whole blocks, and agree as far as the tokens do. This rounds down, never up.
    num_shared = len(parent.block_hashes) * num_shared_tokens // parent.num_tokens
    child._block_hasher = hasher
    child.block_hashes = list(parent.block_hashes[:num_shared])
    child.update_block_hashes()
