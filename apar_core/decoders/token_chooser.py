"""How the next token after every node is chosen, and which candidates are accepted.

Dimensions: R rows, Q nodes of a row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from apar_core.decoders.candidate_tree import CandidateTree
from apar_core.decoders.interface import TokenChoice
from apar_core.decoders.thread_family import Thread


@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """A candidate is accepted where its probability is above min(epsilon, delta * exp(-entropy)).

    Source: Medusa (arXiv 2401.10774), section 2.3.1; the values are those of its implementation.
    """

    epsilon: float = 0.09
    delta: float = 0.3


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """What came back from the device, as lists [R][Q].

    `chosen` follows each node, `given` are the nodes themselves. `accepted` tells for each
    candidate whether it may follow its parent; None where it has to equal the chosen token.
    """

    chosen: list[list[int]]
    given: list[list[int]]
    accepted: list[list[int]] | None

    def next_token(self, row: int, node: int, tree: CandidateTree, thread: Thread) -> int:
        """Return the token that the thread gets after a node."""
        if thread.forced is not None:
            return thread.forced[len(thread.token_ids)]
        if self.accepted is not None:
            for candidate in tree.children[node]:
                if self.accepted[row][candidate]:
                    return self.given[row][candidate]
        return self.chosen[row][node]


def choose_tokens(
    logits_RQV: Tensor,
    tokens_RQ: Tensor,
    tree: CandidateTree,
    choice: TokenChoice,
    acceptance: TypicalAcceptance,
    uniforms_RQ: list[list[float]] | None,
) -> ChosenTokens:
    """Choose after every node, with one transfer from the device."""
    if uniforms_RQ is None:
        both = torch.stack((logits_RQV.argmax(-1), tokens_RQ)).tolist()
        return ChosenTokens(both[0], both[1], None)
    uniforms = torch.tensor(uniforms_RQ, device=logits_RQV.device)
    logits = logits_RQV.float() / choice.temperature
    chosen_RQ = _draw(logits, choice.top_p, uniforms)
    accepted_RQ = _accepted(logits, tokens_RQ, tree, acceptance)
    lists = torch.stack((chosen_RQ, tokens_RQ, accepted_RQ.long())).tolist()
    return ChosenTokens(lists[0], lists[1], lists[2])


def _draw(logits: Tensor, top_p: float, uniforms: Tensor) -> Tensor:
    sorted_p, order = logits.softmax(-1).sort(-1, descending=True)
    sums = sorted_p.cumsum(-1)
    # The likeliest token is always kept, so that something can be drawn.
    kept = (sums - sorted_p) < top_p
    totals = (sorted_p * kept).sum(-1)
    # Side right: a uniform number of 0 must not fall before the first token.
    drawn = torch.searchsorted(sums, (uniforms * totals)[..., None], right=True)
    last_kept = kept.sum(-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(drawn, last_kept))[..., 0]


def _accepted(
    logits: Tensor, tokens_RQ: Tensor, tree: CandidateTree, acceptance: TypicalAcceptance
) -> Tensor:
    probabilities = logits.softmax(-1)
    entropies = -torch.xlogy(probabilities, probabilities).sum(-1)
    bounds = (acceptance.delta * torch.exp(-entropies)).clamp(max=acceptance.epsilon)
    parents = torch.tensor(tree.parents, device=logits.device)
    of_candidate = probabilities[:, parents].gather(-1, tokens_RQ[..., None])[..., 0]
    return of_candidate > bounds[:, parents]
