"""Forward passes of prompt tokens that are inserted after tokens of packed trees.

A batch of packed trees runs without gradients into a cache. The same pass gives the teacher's
logits: prompt token d after a token imitates what the model predicts d + 1 places later in the
same thread. So a parent's thread continues after [Fork], and nothing predicts [Child]. Then only
the prompt tokens run with gradients, as queries on that cache.
Source: PPD (arXiv 2405.18628), sections 3.2 and 3.3.

Dimensions: B rows, T tokens of the longest row, N insertion points of a row, M prompt tokens, E
members of an ensemble, P = N * M * E queries of a row, D hidden size, V vocabulary, K predictions
with a teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import linear
from transformers import DynamicCache, PreTrainedModel

from apar_core.offline.speculation.prompt_tokens import PromptTokens
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, next_indices
from apar_core.offline.training.tree_forward import (
    FLEX,
    attention_mask,
    before_output_layer,
    mask_function,
)
from apar_core.offline.training.tree_trainer import Batch, TreeCollator, tree_batch

FOLLOWING = "following_BT"
_NOTHING_FOLLOWS = -1


@dataclass(frozen=True, slots=True)
class PromptCollator:
    """Adds to a padded micro-batch which token follows each token in its thread."""

    trees: TreeCollator

    def __call__(self, trees: Sequence[PackedTree]) -> Batch:
        """Return one micro-batch."""
        batch = self.trees(trees)
        following_BT = torch.full_like(batch["token_ids_BT"], _NOTHING_FOLLOWS)
        for row, tree in enumerate(trees):
            following = [
                _NOTHING_FOLLOWS if index is None else index for index in next_indices(tree)
            ]
            following_BT[row, : len(following)] = torch.tensor(following, dtype=torch.int64)
        return batch | {FOLLOWING: following_BT}


@dataclass(frozen=True, slots=True)
class Insertions:
    """Prompt tokens inserted after tokens of a batch.

    `after_BN` is the index of a token in its row. `teacher_BNM` is the index of the token d + 1
    places later in its thread: prompt token d imitates the prediction there. `learned_BNM` (bool)
    is false after the end of the thread and for unused places.
    """

    after_BN: Tensor
    teacher_BNM: Tensor
    learned_BNM: Tensor


def insertions(
    batch: Batch, num_prompts: int, share: float = 1.0, generator: torch.Generator | None = None
) -> Insertions:
    """Insert prompt tokens after a random share of the tokens that prompt token 0 can learn from.

    These are the last token of the prompt, [Child] and each token of an answer whose successor
    predicts something. With a share of 1 they come in the order of the row.
    """
    following_BT, has_target_BT = batch[FOLLOWING], batch["targets_BT"] != IGNORED_TARGET
    steps, known = [], []
    at_BT = torch.arange(following_BT.shape[1], device=following_BT.device).expand_as(following_BT)
    learned_BT = has_target_BT
    for _ in range(num_prompts):
        next_BT = following_BT.gather(1, at_BT)
        learned_BT = learned_BT & (next_BT != _NOTHING_FOLLOWS)
        at_BT = next_BT.clamp(min=0)
        learned_BT = learned_BT & has_target_BT.gather(1, at_BT)
        steps.append(at_BT)
        known.append(learned_BT)
    teacher_BTM, learned_BTM = torch.stack(steps, -1), torch.stack(known, -1)
    num_B = (learned_BTM[..., 0].sum(1).double() * share).ceil().long()
    num_points = max(1, int(num_B.max()))
    # On the CPU, so that the draw does not depend on the device.
    order_BT = torch.zeros(following_BT.shape)
    if share < 1:
        order_BT = torch.rand(following_BT.shape, generator=generator)
    order_BT = order_BT.to(following_BT.device).masked_fill(~learned_BTM[..., 0], 2.0)
    after_BN = order_BT.argsort(dim=1, stable=True)[:, :num_points]
    used_BN = torch.arange(num_points, device=num_B.device) < num_B[:, None]
    wide_BNM = after_BN[..., None].expand(-1, -1, num_prompts)
    return Insertions(
        after_BN,
        teacher_BTM.gather(1, wide_BNM),
        learned_BTM.gather(1, wide_BNM) & used_BN[..., None],
    )


def prompt_predictions(
    model: PreTrainedModel,
    prompts: PromptTokens,
    embeddings_MED: Tensor,
    batch: Batch,
    places: Insertions,
) -> tuple[Tensor, Tensor]:
    """Return the predictions [K, V] of prompt tokens and of their teacher.

    The predictions stand in the order of `places.learned_BNM`. Ordinary tokens read no prompt
    token, and gradients reach `embeddings_MED` and the weights of `prompts` only. The embeddings
    are those of `prompts`, as its forward pass returns them.
    """
    cache, teacher_KV = _teacher_pass(model, batch, places)
    if prompts.prefix is not None:
        _add_prefix(cache, prompts.prefix.to(model.dtype), len(places.after_BN))
    settings = prompts.settings
    num_prompts, ensemble, size = embeddings_MED.shape
    num_rows, num_points = places.after_BN.shape
    inputs_BPD = (
        embeddings_MED.to(model.dtype)
        .reshape(num_prompts * ensemble, size)
        .repeat(num_points, 1)
        .expand(num_rows, -1, -1)
    )
    depth_P = torch.arange(num_prompts, device=model.device).repeat_interleave(ensemble)
    depth_P = depth_P.repeat(num_points)
    after_BP = places.after_BN.repeat_interleave(num_prompts * ensemble, dim=1)
    learned_BNM = places.learned_BNM
    distance_K = learned_BNM.nonzero()[:, 2]

    several_exits, read = settings.exits > 1, list[Tensor]()

    def keep(hidden_BPD: Tensor) -> Tensor:
        read.append(hidden_BPD)
        return hidden_BPD[:, :0]

    with before_output_layer(model, keep):
        output = model(
            inputs_embeds=inputs_BPD,
            position_ids=batch["positions_BT"].gather(1, after_BP) + 1 + depth_P,
            attention_mask=prompt_mask(
                model,
                batch,
                after_BP,
                num_prompts,
                ensemble,
                settings.mask,
                prefix=prompts.prefix is not None,
            ),
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=several_exits,
        )
    hidden_BPD = read[0]
    if several_exits:
        # As in the authors' code: the last state has passed the final norm, the others have not.
        hidden_BPD = torch.stack(output.hidden_states[-settings.exits :]).mean(0)
    hidden_KED = hidden_BPD.reshape(*learned_BNM.shape, ensemble, size)[learned_BNM]
    merged_KED = prompts.merged(hidden_KED, distance_K)
    if prompts.head is not None:
        logits_KEV = linear(merged_KED.to(prompts.head.dtype), prompts.head)
    else:
        output_layer = model.get_output_embeddings()
        assert isinstance(output_layer, Module)
        logits_KEV = output_layer(merged_KED)
    return prompts.combined(logits_KEV), teacher_KV


def _add_prefix(cache: DynamicCache, prefix: Tensor, num_rows: int) -> None:
    """Append the keys and values of a prefix [L, 2, M, H, D] to each row of a cache."""
    for layer, (key_MHD, value_MHD) in enumerate(prefix):
        cache.update(
            key_MHD.transpose(0, 1).expand(num_rows, -1, -1, -1),
            value_MHD.transpose(0, 1).expand(num_rows, -1, -1, -1),
            layer,
        )


@torch.no_grad()
def _teacher_pass(
    model: PreTrainedModel, batch: Batch, places: Insertions
) -> tuple[DynamicCache, Tensor]:
    """Run the ordinary tokens; return their cache and the logits [K, V] of the teachers."""
    rows_BNM = torch.arange(len(places.after_BN), device=model.device)[:, None, None]
    rows_K = rows_BNM.expand_as(places.teacher_BNM)[places.learned_BNM]
    at_K = places.teacher_BNM[places.learned_BNM]
    trees = tree_batch(batch)
    cache = DynamicCache(config=model.config)
    with before_output_layer(model, lambda hidden_BTD: hidden_BTD[rows_K, at_K]):
        output = model(
            input_ids=trees.token_ids_BT,
            position_ids=trees.positions_BT,
            attention_mask=attention_mask(model, trees),
            past_key_values=cache,
            use_cache=True,
        )
    teacher_KV: Tensor = output.logits
    return cache, teacher_KV


def prompt_mask(
    model: PreTrainedModel,
    batch: Batch,
    after_BP: Tensor,
    num_prompts: int,
    ensemble: int,
    mask: str = "ensemble",
    *,
    prefix: bool = False,
) -> Tensor | BlockMask:
    """Return the mask [B, 1, P, T + P]: each query reads its path, itself and its own chain.

    With a `prefix` there are M keys more after the first T, one for each prompt token.

    What it reads of its chain depends on `mask`:

    - `ensemble`: the same member of the prompt tokens before its own.
    - `decoder`: all embeddings before its own, also those of the same prompt token.
    - `encoder`: all members of its own prompt token and of those before.

    Source: PPD, appendix B.5. In the authors' code, encoder reads its own prompt token only.
    """
    trees = tree_batch(batch)
    (num_rows, num_queries), num_tokens = after_BP.shape, trees.token_ids_BT.shape[1]
    chain = num_prompts * ensemble
    reads_tree = mask_function(trees)
    num_before = num_tokens + (num_prompts if prefix else 0)

    def reads_prefix(query: Tensor, key: Tensor) -> Tensor:
        return query % chain // ensemble == key

    def reads_prompt(query: Tensor, key: Tensor) -> Tensor:
        same_chain = query // chain == key // chain
        if mask == "ensemble":
            return same_chain & (query % ensemble == key % ensemble) & (key <= query)
        if mask == "decoder":
            return same_chain & (key <= query)
        return same_chain & (key // ensemble <= query // ensemble)

    if model.config._attn_implementation == FLEX:

        def reads(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            token = key.clamp(max=num_tokens - 1)
            on_path = reads_tree(row, head, after_BP[row, query], token)
            other = reads_prompt(query, key - num_before)
            if prefix:
                own = reads_prefix(query, key - num_tokens)
                other = torch.where(key < num_before, own, other)
            return torch.where(key < num_tokens, on_path, other)

        return create_block_mask(
            reads,
            B=num_rows,
            H=None,
            Q_LEN=num_queries,
            KV_LEN=num_before + num_queries,
            device=after_BP.device,
        )
    tree_BTT = attention_mask(model, trees)
    assert isinstance(tree_BTT, Tensor)
    rows_B1 = torch.arange(num_rows, device=after_BP.device)[:, None]
    query_P = torch.arange(num_queries, device=after_BP.device)
    parts = [reads_prompt(query_P[:, None], query_P[None])]
    if prefix:
        parts = [reads_prefix(query_P[:, None], query_P[None, :num_prompts]), *parts]
    own_BPK = torch.cat(parts, -1).expand(num_rows, -1, -1)
    return torch.cat((tree_BTT[:, 0][rows_B1, after_BP], own_BPK), -1)[:, None]
