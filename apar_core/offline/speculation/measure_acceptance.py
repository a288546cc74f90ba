"""Measurement of acceptance: the rank of the model's own greedy tokens among the proposals.

Prompt tokens and Medusa heads are measured alike: number d (from 0) proposes the token d + 2 places
after a token, at distance d + 1 behind the model's own next token.
Source: PPD (arXiv 2405.18628), section 4.2 (acceptance) and figure 6 (accuracy).

Dimensions: B rows, N places of a row or of all rows, M distances, V vocabulary, K predictions, R
ranks.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from apar_core.errors import TrainingError
from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.decoders.interface import AnswerDecoder, DecodedAnswer, decode_answer
from apar_core.offline.decoders.load import load_decoder
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.medusa_heads import MedusaHeads
from apar_core.offline.speculation.prompt_forward import (
    Insertions,
    PromptCollator,
    insertions,
    prompt_logits,
)
from apar_core.offline.speculation.prompt_tokens import PromptTokens
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree
from apar_core.offline.training.pretrained import pad_token_id, tree_tokens
from apar_core.offline.training.tree_forward import SDPA, hidden_states
from apar_core.offline.training.tree_trainer import Batch, TreeCollator, tree_batch

NUM_RANKS = 10
"""Ranks of a table: as many candidates as figure 6 of the PPD paper compares."""

THREAD_ENDED = -1
"""Instead of a rank, at distances behind the end of a thread."""

Proposer = PromptTokens | MedusaHeads


def prompts_of(rows: Sequence[PackedTree], number: int, seed: int) -> list[list[int]]:
    """Return the prompts of a random sample of `number` examples, or of all if there are fewer."""
    prompts = []
    for row in random.Random(seed).sample(rows, min(number, len(rows))):
        learned = (i for i, target in enumerate(row.targets) if target != IGNORED_TARGET)
        prompts.append(list(row.token_ids[: next(learned) + 1]))
    return prompts


def greedy_rows(
    decoder: AnswerDecoder, prompts: Sequence[Sequence[int]], tokens: TreeTokens
) -> list[PackedTree]:
    """Return the decoder's greedy answers, one row per thread with its whole path."""
    return [
        row
        for prompt in prompts
        for row in thread_rows(prompt, decode_answer(decoder, prompt), tokens)
    ]


def thread_rows(
    prompt: Sequence[int], answer: DecodedAnswer, tokens: TreeTokens
) -> list[PackedTree]:
    """Return each thread as a row whose targets are the thread's own tokens and its end."""
    rows = []
    paths: dict[str | None, list[int]] = {None: list(prompt)}
    forks: dict[str | None, list[int]] = {None: []}
    for thread in answer.threads:
        start = paths[None]
        if thread.parent is not None:
            opened = forks[thread.parent][thread.fork_ordinal]
            start = [*paths[thread.parent][: opened + 1], tokens.child_id]
        path = [*start, *thread.token_ids]
        own = range(len(start), len(path))
        paths[thread.thread] = path
        forks[thread.thread] = [at for at in own if path[at] == tokens.fork_id]
        ids = [*path, tokens.end_id] if thread.ended else path
        targets = [
            ids[at + 1] if len(start) - 1 <= at < len(ids) - 1 else IGNORED_TARGET
            for at in range(len(ids))
        ]
        rows.append(PackedTree(ids, list(range(len(ids))), targets, [0] * len(ids), [None]))
    return rows


@torch.no_grad()
def measure_ranks(
    model: PreTrainedModel,
    proposer: Proposer,
    rows: Sequence[PackedTree],
    *,
    banned: Sequence[int] = (),
    num_ranks: int = NUM_RANKS,
    micro_batch_size: int = 16,
    pad_id: int = 0,
) -> Tensor:
    """Return the rank of each row's targets among the proposals, int64 [N, M].

    A place is a token whose successor in the thread predicts something; those of the shortest rows
    come first. The rank is `num_ranks` if the target is not among the best, and THREAD_ENDED behind
    the end of the thread. `banned` tokens are never proposed.
    """
    proposer = copy.deepcopy(proposer).to(device=model.device, dtype=model.dtype)
    collator = PromptCollator(TreeCollator.for_model(model, pad_id))
    in_order = sorted(rows, key=lambda row: len(row.token_ids))
    found = []
    for start in range(0, len(in_order), micro_batch_size):
        batch = {
            name: tensor.to(model.device)
            for name, tensor in collator(in_order[start : start + micro_batch_size]).items()
        }
        places = insertions(batch, num_distances(proposer))
        learned_BNM = places.learned_BNM
        logits_KV = _logits(model, proposer, batch, places)
        logits_KV[:, list(banned)] = -torch.inf
        best_KR = logits_KV.topk(num_ranks, -1).indices
        rows_B11 = torch.arange(len(learned_BNM), device=model.device)[:, None, None]
        target_K = batch["targets_BT"][rows_B11, places.teacher_BNM][learned_BNM]
        hit_KR = best_KR == target_K[:, None]
        rank_K = torch.where(hit_KR.any(-1), hit_KR.int().argmax(-1), num_ranks)
        rank_BNM = torch.full(learned_BNM.shape, THREAD_ENDED, device=model.device)
        rank_BNM[learned_BNM] = rank_K
        found.append(rank_BNM[learned_BNM[..., 0]].cpu())
    return torch.cat(found)


def num_distances(proposer: Proposer) -> int:
    """Return how many tokens behind the model's own next token are proposed."""
    if isinstance(proposer, PromptTokens):
        return proposer.settings.num_prompts
    return proposer.settings.medusa_num_heads


def _logits(model: PreTrainedModel, proposer: Proposer, batch: Batch, places: Insertions) -> Tensor:
    """Return the proposer's logits [K, V], in the order of `places.learned_BNM`."""
    if isinstance(proposer, PromptTokens):
        logits_KEV, _ = prompt_logits(model, proposer(), batch, places)
        return proposer.combined(logits_KEV)
    hidden_BTD = hidden_states(model, tree_batch(batch))
    rows_B1 = torch.arange(len(hidden_BTD), device=model.device)[:, None]
    logits_MBNV: Tensor = proposer(hidden_BTD[rows_B1, places.after_BN])
    return logits_MBNV.movedim(0, 2)[places.learned_BNM]


def acceptance_table(ranks_NM: Tensor, num_ranks: int, source: str = "") -> AcceptanceTable:
    """Return the table of measured ranks.

    Row d counts the places at which all nearer tokens were among the candidates, of any rank, and
    the thread had not ended. Raises TrainingError if there is no such place.
    """
    counted_N = torch.ones(len(ranks_NM), dtype=torch.bool)
    hits, observations = [], []
    for distance, rank_N in enumerate(ranks_NM.unbind(1), 1):
        counted_N = counted_N & (rank_N != THREAD_ENDED)
        observations.append(int(counted_N.sum()))
        if observations[-1] == 0:
            raise TrainingError(
                f"no acceptance table: no answer is right up to distance {distance - 1} and has a "
                f"token at distance {distance} ({len(ranks_NM)} places measured)"
            )
        hits.append(torch.bincount(rank_N[counted_N], minlength=num_ranks + 1)[:num_ranks].tolist())
        counted_N = counted_N & (rank_N < num_ranks)
    return AcceptanceTable.from_counts(hits, observations, source)


def accuracy(ranks_NM: Tensor, top_k: int) -> list[float]:
    """Return for each distance how often the target is among the best `top_k`.

    Unlike in the table, nearer tokens do not matter. Source: PPD, tables 2 to 8 and figure 6.
    """
    shares = []
    for rank_N in ranks_NM.unbind(1):
        known_N = rank_N[rank_N != THREAD_ENDED]
        shares.append(float((known_N < top_k).double().mean()))
    return shares


def measure_and_write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    folder: Path,
) -> AcceptanceTable:
    """Measure on the model's greedy forked answers to prompts; write the table to `folder`."""
    # FlexAttention is for training; the decoders' masks are tensors.
    model.set_attn_implementation(SDPA)
    decoder = load_decoder("vanilla_apar", model, tokenizer, device=str(model.device))
    tokens = tree_tokens(tokenizer)
    rows = greedy_rows(decoder, prompts, tokens)
    ranks_NM = measure_ranks(
        model, proposer, rows, banned=(tokens.child_id,), pad_id=pad_token_id(tokenizer)
    )
    source = f"{len(prompts)} held-out prompts, {len(rows)} threads, {len(ranks_NM)} places, greedy"
    table = acceptance_table(ranks_NM, NUM_RANKS, source)
    table.write(folder)
    return table
