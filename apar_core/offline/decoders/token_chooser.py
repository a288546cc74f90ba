"""Choice of the next token after each node, and acceptance of candidates.

Greedy decoding accepts a candidate that equals the chosen token. Sampling uses typical acceptance
(Medusa, arXiv 2401.10774, section 2.3.1), which does not preserve the model's distribution: it
prefers proposed text that the model finds likely enough. After the accepted path a token is drawn;
a candidate that equals it is accepted too.
Dimensions: R rows, Q nodes of a row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apar_core.offline.decoders.interface import TokenChoice
from apar_core.offline.decoders.thread_family import Thread
from apar_core.offline.speculation.candidate_tree import CandidateTree

MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """Accept a candidate x if p(x) > min(epsilon, delta * exp(-H(p))), where H is the entropy.

    p is the distribution that tokens are drawn from, with the request's temperature and `top_p`;
    candidates outside `top_p` are not accepted. The first node of a row was chosen before, so it is
    always accepted. The longest path of accepted candidates is kept, the likeliest in case of ties.

    Source: Medusa (arXiv 2401.10774), section 2.3.1. The values are those of its implementation,
    where delta is the square root of epsilon.
    """

    epsilon: float = 0.09
    delta: float = 0.3


EXACT = TypicalAcceptance(epsilon=1.0, delta=math.inf)
"""Accepts only candidates that equal the token drawn: samples are those of plain decoding."""


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Result of the choice, as lists [R][Q].

    `chosen` has the token after each node and `given` the nodes' own tokens. `accepted` marks the
    nodes on the path that typical acceptance keeps; None if a candidate must equal the chosen
    token.
    """

    chosen: list[list[int]]
    given: list[list[int]]
    accepted: list[list[bool]] | None

    def next_token(self, row: int, node: int, tree: CandidateTree, thread: Thread) -> int:
        """Return the thread's token after a node."""
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
    trees: Sequence[CandidateTree],
    choice: TokenChoice,
    acceptance: TypicalAcceptance,
    uniforms_RQ: list[list[float]] | None,
) -> ChosenTokens:
    """Choose a token after each node, with one transfer from the device.

    `trees` has the tree of each row; nodes that a row's tree lacks are computed and ignored.
    """
    if uniforms_RQ is None:
        both = torch.stack((logits_RQV.argmax(-1), tokens_RQ)).tolist()
        return ChosenTokens(both[0], both[1], None)
    uniforms = torch.tensor(uniforms_RQ, device=logits_RQV.device)
    logits = logits_RQV.float()
    # Subtracting the maximum avoids overflow at low temperatures.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(choice.temperature, MIN_TEMPERATURE)
    nucleus = _nucleus(logits, choice.top_p)
    chosen_RQ = nucleus.draw(uniforms)
    scores_RQ = _scores(nucleus.probabilities(), tokens_RQ, trees, acceptance)
    # A double represents token ids exactly.
    chosen, given, scores = torch.stack((chosen_RQ, tokens_RQ, scores_RQ.double())).tolist()
    return ChosenTokens(
        [[int(token) for token in row] for row in chosen],
        [[int(token) for token in row] for row in given],
        [accepted_path(row, tree) for row, tree in zip(scores, trees, strict=True)],
    )


def accepted_path(scores: Sequence[float], tree: CandidateTree) -> list[bool]:
    """Return for each node whether it is on the longest path of accepted candidates.

    `scores` [Q] are log probabilities, -inf if not accepted. The highest sum breaks ties.
    """
    best = (0, 0.0, 0)
    pending = [best]
    while pending:
        length, total, node = pending.pop()
        best = max(best, (length, total, node), key=lambda path: path[:2])
        pending += [
            (length + 1, total + scores[candidate], candidate)
            for candidate in tree.children[node]
            if scores[candidate] > -math.inf
        ]
    on_path = [False] * tree.num_chosen
    node = best[2]
    while node != 0:
        on_path[node] = True
        node = tree.parents[node]
    on_path[0] = True
    return on_path


@dataclass(frozen=True, slots=True)
class _Nucleus:
    """Likeliest tokens with a total probability of `top_p`.

    `sorted_p` has the probabilities of all tokens in descending order, `sums` their cumulative sums
    and `order` their ids; `kept` marks the nucleus.
    """

    sorted_p: Tensor
    sums: Tensor
    kept: Tensor
    order: Tensor

    def draw(self, uniforms: Tensor) -> Tensor:
        totals = (self.sorted_p * self.kept).sum(-1)
        # right=True: a random number of 0 must select the first token.
        drawn = torch.searchsorted(self.sums, (uniforms * totals)[..., None], right=True)
        last_kept = self.kept.sum(-1, keepdim=True) - 1
        return self.order.gather(-1, torch.minimum(drawn, last_kept))[..., 0]

    def probabilities(self) -> Tensor:
        """Return the renormalized probability of each token id."""
        kept_p = self.sorted_p * self.kept
        shares = kept_p / kept_p.sum(-1, keepdim=True)
        return torch.zeros_like(shares).scatter(-1, self.order, shares)


def _nucleus(logits: Tensor, top_p: float) -> _Nucleus:
    sorted_p, order = logits.softmax(-1).sort(-1, descending=True)
    sums = sorted_p.cumsum(-1)
    # The likeliest token is always kept.
    return _Nucleus(sorted_p, sums, (sums - sorted_p) < top_p, order)


def _scores(
    probabilities: Tensor,
    tokens_RQ: Tensor,
    trees: Sequence[CandidateTree],
    acceptance: TypicalAcceptance,
) -> Tensor:
    """Return each node's log probability given its parent, -inf if not accepted."""
    entropies = -torch.xlogy(probabilities, probabilities).sum(-1)
    bounds = (acceptance.delta * torch.exp(-entropies)).clamp(max=acceptance.epsilon)
    num_nodes, device = tokens_RQ.shape[1], probabilities.device
    parents = [(tree.parents[: tree.num_chosen] + (0,) * num_nodes)[:num_nodes] for tree in trees]
    parents_RQ = torch.tensor(parents, device=device)
    rows_R1 = torch.arange(len(trees), device=device)[:, None]
    of_node = probabilities[rows_R1, parents_RQ, tokens_RQ]
    return of_node.log().masked_fill(of_node <= bounds.gather(1, parents_RQ), -torch.inf)
