"""Measurement of acceptance: the rank of the model's own greedy tokens among the proposals.

Prompt tokens and Medusa heads are measured alike: number d (from 0) proposes the token d + 2 places
after a token, at distance d + 1 after the model's own next token.
Source: PPD (arXiv 2405.18628), section 4.2 (acceptance) and figure 6 (accuracy).

Acceptance is counted at the places where a step of a decoder begins. These are not all places: a
step skips the tokens that it accepts, so more steps begin where guesses are wrong. Of apar-tiny's
Medusa heads, a table of all places predicts 2.71 tokens per step for a tree that yields 2.64.

Dimensions: B rows, N places of a row or of all rows, M distances, V vocabulary, K predictions, R
ranks.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor
from transformers import PreTrainedModel

from apar_core.errors import TrainingError
from apar_core.offline.speculation.acceptance import STARTING_PLACES, AcceptanceTable
from apar_core.offline.speculation.medusa_heads import MedusaHeads
from apar_core.offline.speculation.prompt_forward import (
    Insertions,
    PromptCollator,
    insertions,
    prompt_predictions,
)
from apar_core.offline.speculation.prompt_tokens import PromptTokens
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree
from apar_core.offline.training.tree_forward import hidden_states
from apar_core.offline.training.tree_trainer import Batch, TreeCollator, tree_batch

NUM_RANKS = 10
"""Ranks of a table: as many candidates as figure 6 of the PPD paper compares."""

THREAD_ENDED = -1
"""Instead of a rank, at distances after the end of a thread."""

Proposer = PromptTokens | MedusaHeads


def prompts_of(rows: Sequence[PackedTree], number: int, seed: int) -> list[list[int]]:
    """Return the prompts of a random sample of `number` examples, or of all if there are fewer."""
    prompts = []
    for row in random.Random(seed).sample(rows, min(number, len(rows))):
        learned = (i for i, target in enumerate(row.targets) if target != IGNORED_TARGET)
        prompts.append(list(row.token_ids[: next(learned) + 1]))
    return prompts


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
) -> list[Tensor]:
    """Return the ranks of each row's targets among the proposals, int64 [N, M] for each row.

    A place is a token whose successor in the thread predicts something, in the order of the row.
    The rank is `num_ranks` if the target is not among the best, and THREAD_ENDED after the end of
    the thread. `banned` tokens are never proposed.
    """
    proposer = copy.deepcopy(proposer).to(device=model.device, dtype=model.dtype)
    collator = PromptCollator(TreeCollator.for_model(model, pad_id))
    # Rows of similar length together, so that there is little padding.
    in_order = sorted(range(len(rows)), key=lambda number: len(rows[number].token_ids))
    found: dict[int, Tensor] = {}
    for start in range(0, len(in_order), micro_batch_size):
        numbers = in_order[start : start + micro_batch_size]
        batch = {
            name: tensor.to(model.device)
            for name, tensor in collator([rows[number] for number in numbers]).items()
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
        for number, rank_NM, learned_NM in zip(numbers, rank_BNM, learned_BNM, strict=True):
            found[number] = rank_NM[learned_NM[:, 0]].cpu()
    return [found[number] for number in range(len(rows))]


def num_distances(proposer: Proposer) -> int:
    """Return how many tokens after the model's own next token are proposed."""
    if isinstance(proposer, PromptTokens):
        return proposer.settings.num_prompts
    return proposer.settings.medusa_num_heads


def _logits(model: PreTrainedModel, proposer: Proposer, batch: Batch, places: Insertions) -> Tensor:
    """Return the proposer's logits [K, V], in the order of `places.learned_BNM`."""
    if isinstance(proposer, PromptTokens):
        return prompt_predictions(model, proposer, proposer(), batch, places)[0]
    hidden_BTD = hidden_states(model, tree_batch(batch))
    rows_B1 = torch.arange(len(hidden_BTD), device=model.device)[:, None]
    output_layer = model.get_output_embeddings()
    logits_MBNV: Tensor = proposer(hidden_BTD[rows_B1, places.after_BN], output_layer)
    return logits_MBNV.movedim(0, 2)[places.learned_BNM]


def step_starts(ranks_NM: Tensor) -> list[int]:
    """Return the places of a thread where a step begins that accepts the likeliest candidates.

    The last places, which have fewer than M tokens after them, are left out: what a step yields
    there depends on the end of the thread.
    """
    starts, place = [], 0
    ranks = ranks_NM.tolist()
    while place < len(ranks) and ranks[place][-1] != THREAD_ENDED:
        starts.append(place)
        place += 1 + sum(1 for _ in takewhile(lambda rank: rank == 0, ranks[place]))
    return starts


def acceptance_table(ranks: Sequence[Tensor], num_ranks: int, source: str = "") -> AcceptanceTable:
    """Return the table of the ranks [N, M] of each thread, with the accuracy at all places.

    Row d counts the steps in which all nearer tokens were among the candidates, of any rank. Raises
    TrainingError if there is no such step.
    """
    started_NM = torch.cat([rank_NM[step_starts(rank_NM)] for rank_NM in ranks])
    counted_N = torch.ones(len(started_NM), dtype=torch.bool)
    hits, observations = [], []
    for distance, rank_N in enumerate(started_NM.unbind(1), 1):
        observations.append(int(counted_N.sum()))
        if observations[-1] == 0:
            raise TrainingError(
                f"no acceptance table: in none of {len(started_NM)} steps are the guesses up to "
                f"distance {distance - 1} right"
            )
        hits.append(torch.bincount(rank_N[counted_N], minlength=num_ranks + 1)[:num_ranks].tolist())
        counted_N = counted_N & (rank_N < num_ranks)
    table = AcceptanceTable.from_counts(hits, observations, source)
    starts = [rank_NM[:STARTING_PLACES] for rank_NM in ranks]
    return table.model_copy(
        update={
            "accuracy": accuracy(ranks, num_ranks),
            "accuracy_at_start": accuracy(starts, num_ranks),
        }
    )


def accuracy(ranks: Sequence[Tensor], num_ranks: int) -> tuple[tuple[float, ...], ...]:
    """Return for each distance how often the target is among the best k, for k = 1 to `num_ranks`.

    Unlike in the table, all places count, and nearer tokens do not matter. Source: PPD, tables 2 to
    8 and figure 6.
    """
    found = []
    for rank_N in torch.cat(list(ranks)).unbind(1):
        known_N = rank_N[rank_N != THREAD_ENDED]
        hits_R = torch.bincount(known_N, minlength=num_ranks + 1)[:num_ranks].cumsum(0)
        found.append(tuple((hits_R.double() / max(len(known_N), 1)).tolist()))
    return tuple(found)
