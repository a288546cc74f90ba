"""How the next token after every node is chosen, and which candidates are accepted.

Greedily a candidate is accepted where it equals the chosen token. At a temperature acceptance is
typical (Medusa, arXiv 2401.10774, section 2.3.1), which does not keep the model's distribution:
text that the heads propose and the model finds likely enough is preferred. Behind the accepted
path a token is drawn, and a candidate that happens to be the drawn token is kept as well.
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
    """A candidate x is accepted where p(x) > min(epsilon, delta * exp(-H(p))), H being the entropy.

    p is the distribution that tokens are drawn from: the model's after the tokens before x, at the
    temperature of the request and within its `top_p`. No candidate outside `top_p` is accepted. A
    row's first node is always accepted, since it was chosen from p itself. Of the candidates'
    paths the longest on which all are accepted is kept; of several, the likeliest.

    Source: Medusa (arXiv 2401.10774), section 2.3.1; the values are those of its implementation,
    where delta is the square root of epsilon.
    """

    epsilon: float = 0.09
    delta: float = 0.3


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """What came back from the device, as lists [R][Q].

    `chosen` follows each node, `given` are the nodes themselves. `accepted` tells for each node
    whether it lies on the path that typical acceptance keeps; None where a candidate has to equal
    the chosen token.
    """

    chosen: list[list[int]]
    given: list[list[int]]
    accepted: list[list[bool]] | None

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
    logits = logits_RQV.float()
    # Less the largest, so that no temperature is too low to divide by.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(choice.temperature, MIN_TEMPERATURE)
    nucleus = _nucleus(logits, choice.top_p)
    chosen_RQ = nucleus.draw(uniforms)
    scores_RQ = _scores(nucleus.probabilities(), tokens_RQ, tree, acceptance)
    # A double holds every token id exactly.
    chosen, given, scores = torch.stack((chosen_RQ, tokens_RQ, scores_RQ.double())).tolist()
    return ChosenTokens(
        [[int(token) for token in row] for row in chosen],
        [[int(token) for token in row] for row in given],
        [accepted_path(row, tree) for row in scores],
    )


def accepted_path(scores: Sequence[float], tree: CandidateTree) -> list[bool]:
    """Tell for each node whether it lies on the longest path of accepted candidates.

    `scores` [Q] are log probabilities, -inf where a candidate is not accepted. Of several longest
    paths the one with the highest sum is taken.
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
    on_path = [False] * len(tree.parents)
    node = best[2]
    while node != 0:
        on_path[node] = True
        node = tree.parents[node]
    on_path[0] = True
    return on_path


@dataclass(frozen=True, slots=True)
class _Nucleus:
    """The likeliest tokens that together have the share `top_p`, likeliest first.

    `sorted_p` are the probabilities of all tokens and `order` their ids; `kept` marks the nucleus.
    """

    sorted_p: Tensor
    sums: Tensor
    kept: Tensor
    order: Tensor

    def draw(self, uniforms: Tensor) -> Tensor:
        totals = (self.sorted_p * self.kept).sum(-1)
        # Side right: a uniform number of 0 must not fall before the first token.
        drawn = torch.searchsorted(self.sums, (uniforms * totals)[..., None], right=True)
        last_kept = self.kept.sum(-1, keepdim=True) - 1
        return self.order.gather(-1, torch.minimum(drawn, last_kept))[..., 0]

    def probabilities(self) -> Tensor:
        """Return what each token is drawn with, by its id."""
        kept_p = self.sorted_p * self.kept
        shares = kept_p / kept_p.sum(-1, keepdim=True)
        return torch.zeros_like(shares).scatter(-1, self.order, shares)


def _nucleus(logits: Tensor, top_p: float) -> _Nucleus:
    sorted_p, order = logits.softmax(-1).sort(-1, descending=True)
    sums = sorted_p.cumsum(-1)
    # The likeliest token is always kept, so that something can be drawn.
    return _Nucleus(sorted_p, sums, (sums - sorted_p) < top_p, order)


def _scores(
    probabilities: Tensor, tokens_RQ: Tensor, tree: CandidateTree, acceptance: TypicalAcceptance
) -> Tensor:
    """Return each node's log probability after its parent, -inf where it is not accepted."""
    entropies = -torch.xlogy(probabilities, probabilities).sum(-1)
    bounds = (acceptance.delta * torch.exp(-entropies)).clamp(max=acceptance.epsilon)
    parents = torch.tensor(tree.parents, device=probabilities.device)
    of_node = probabilities[:, parents].gather(-1, tokens_RQ[..., None])[..., 0]
    return of_node.log().masked_fill(of_node <= bounds[:, parents], -torch.inf)
