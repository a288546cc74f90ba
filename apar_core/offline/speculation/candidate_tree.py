"""Candidate tree: the tokens of a row in one pass (last token, candidates, child token)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class CandidateTree:
    """Nodes of a row in depth-first order; node 0 is the token chosen last.

    Node n continues `parents[n]` with candidate number `ranks[n]` of head `depths[n] - 1`. The
    likeliest chain comes first, so accepting it moves nothing in the cache. With `opens_child` the
    last node is a child token that continues node 0.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]
    opens_child: bool

    @cached_property
    def num_candidates(self) -> int:
        """Number of nodes that the heads fill."""
        return len(self.parents) - 1 - self.opens_child

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Candidates after each node, likeliest first."""
        candidates = range(1, 1 + self.num_candidates)
        return tuple(
            tuple(node for node in candidates if self.parents[node] == parent)
            for parent in range(len(self.parents))
        )

    def visible(self) -> Tensor:
        """Return bool [Q, Q + 2]: which of prefix, nodes and unused slots each node reads."""
        num_nodes = len(self.parents)
        visible = torch.zeros(num_nodes, num_nodes + 2, dtype=torch.bool)
        visible[:, 0] = True
        for node in range(num_nodes):
            if node > 0:
                visible[node] |= visible[self.parents[node]]
            visible[node, node + 1] = True
        return visible


def candidate_tree(top_k: Sequence[int], *, opens_child: bool) -> CandidateTree:
    """Return the tree in which each node of depth d is followed by `top_k[d]` candidates."""
    parents, depths, ranks = [0], [0], [0]

    def add_below(parent: int, depth: int) -> None:
        if depth == len(top_k):
            return
        for rank in range(top_k[depth]):
            parents.append(parent)
            depths.append(depth + 1)
            ranks.append(rank)
            add_below(len(parents) - 1, depth + 1)

    add_below(0, 0)
    if opens_child:
        parents.append(0)
        depths.append(1)
        ranks.append(0)
    return CandidateTree(tuple(parents), tuple(depths), tuple(ranks), opens_child)
