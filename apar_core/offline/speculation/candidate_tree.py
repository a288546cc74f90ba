"""Nodes of a row in one pass: last token, candidates, child token and prompt tokens.

Dimensions: S trees, Q nodes of the largest tree, K ranks, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from apar_core.offline.speculation.sparse_tree import SparseTree

# Sources of a node's token; candidates come after them.
_PENDING, _CHILD, _NUM_FIXED = 0, 1, 2


@dataclass(frozen=True)
class CandidateTree:
    """Nodes of a row: those that a token is chosen after, then prompt tokens.

    Node 0 is the token chosen last, and the candidates follow depth-first. Candidate n continues
    `parents[n]` with the token of rank `ranks[n]` at distance `depths[n]`. The likeliest chain is
    the first, so accepting it moves nothing in the cache. With `opens_child` the next node is a
    child token that continues node 0.

    `prompts[n]` prompt tokens follow node n, from node `first_prompts[n]`, ordered by distance,
    then by member of the ensemble. A member reads the node's path and the same member at the
    distances before it (PPD, arXiv 2405.18628, section 3.2). `embeddings[n]` is the prompt
    embedding of a node, counted from 1 over all distances and members, and 0 for a token.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]
    embeddings: tuple[int, ...]
    prompts: tuple[int, ...]
    first_prompts: tuple[int, ...]
    opens_child: bool

    @property
    def num_chosen(self) -> int:
        """Number of nodes that a token is chosen after: all but the prompt tokens."""
        return len(self.prompts)

    @property
    def num_candidates(self) -> int:
        """Number of proposed tokens."""
        return self.num_chosen - 1 - self.opens_child

    @property
    def child_node(self) -> int:
        """Node of the child token in a tree that opens a child."""
        return self.num_chosen - 1

    @cached_property
    def depth(self) -> int:
        """Candidates on the longest path."""
        return max(self.depths[: 1 + self.num_candidates])

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Candidates after each node, likeliest first."""
        candidates = range(1, 1 + self.num_candidates)
        return tuple(
            tuple(node for node in candidates if self.parents[node] == parent)
            for parent in range(self.num_chosen)
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


def candidate_tree(
    tree: SparseTree, *, opens_child: bool = False, ensemble: int = 1, child_prompts: int = 0
) -> CandidateTree:
    """Return the nodes of a sparse tree, with a child token that has its own prompt tokens.

    With an ensemble of 0 the predictions after a node need no input, as those of Medusa heads.
    """
    parents, depths, ranks = list(tree.parents), list(tree.depths), list(tree.ranks)
    prompts = list(tree.prompts)
    if opens_child:
        parents.append(0)
        depths.append(1)
        ranks.append(0)
        prompts.append(child_prompts)
    embeddings = [0] * len(parents)
    first_prompts = []
    for node, num_prompts in enumerate(prompts):
        first = len(parents)
        first_prompts.append(first)
        for place in range(num_prompts * ensemble):
            parents.append(node if place < ensemble else first + place - ensemble)
            depths.append(depths[node] + 1 + place // ensemble)
            ranks.append(0)
            embeddings.append(1 + place)
    return CandidateTree(
        tuple(parents),
        tuple(depths),
        tuple(ranks),
        tuple(embeddings),
        tuple(prompts),
        tuple(first_prompts),
        opens_child,
    )


def full_trees(top_k: Sequence[int]) -> tuple[SparseTree, ...]:
    """Return trees of Medusa heads by state: in the last, `top_k[d]` candidates follow depth d."""
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
    most = len(top_k)
    full = SparseTree(tuple(parents), tuple(depths), tuple(ranks), (most,) * len(parents))
    return (SparseTree((0,), (0,), (0,), (most,)),) * most + (full,)


class TreeStack:
    """Trees that the rows of a pass choose from, as tensors on the model's device.

    A row in state s, which has s predictions to start with, takes tree 2 * s, or 2 * s + 1 if it
    opens a child. Trees are padded to the largest one; padding nodes are never chosen after.
    `num_ranks` is the number of candidates needed at each distance.
    """

    def __init__(
        self,
        states: Sequence[SparseTree],
        device: torch.device,
        *,
        ensemble: int = 1,
        child_prompts: int = 0,
    ) -> None:
        self.trees = tuple(
            candidate_tree(
                tree, opens_child=opens_child, ensemble=ensemble, child_prompts=child_prompts
            )
            for tree in states
            for opens_child in (False, True)
        )
        self.has_prompts = any(any(tree.embeddings) for tree in self.trees)
        self.num_ranks = 1 + max(max(tree.ranks) for tree in self.trees)
        width = max(len(tree.parents) for tree in self.trees)
        num_trees = len(self.trees)
        # A padding node reads the prefix only: a row of attention must not be empty.
        visible_QSK = torch.zeros(width, num_trees, width + 2, dtype=torch.bool)
        visible_QSK[:, :, 0] = True
        for number, tree in enumerate(self.trees):
            size = len(tree.parents)
            visible_QSK[:size, number, : size + 1] = tree.visible()[:, :-1]
        self._num_kinds = width + 2
        self._visible = visible_QSK.flatten(1).to(device)
        self._depths = self._padded(width, device, 0, [tree.depths for tree in self.trees])
        embeddings = [tree.embeddings for tree in self.trees]
        self._embeddings = self._padded(width, device, 0, embeddings)
        parents = [tree.parents[: 1 + tree.num_candidates] for tree in self.trees]
        self._parents = self._padded(width, device, 0, parents)
        ranks = [tree.ranks[: 1 + tree.num_candidates] for tree in self.trees]
        self._ranks = self._padded(width, device, 0, ranks)
        sources = [self._sources_of(tree) for tree in self.trees]
        self._sources = self._padded(width, device, _CHILD, sources)

    def mask(self, trees_R1: Tensor, starts_R1: Tensor, num_nodes: int, num_slots: int) -> Tensor:
        """Return bool [R, 1, num_nodes, num_slots]: the slots that each node reads.

        A row's nodes begin at slot `starts_R1`; the slots before hold its prefix.
        """
        slots_T = torch.arange(num_slots, device=self._visible.device)
        # 0: prefix, 1 ...: nodes; the last kind is a slot that this row does not use yet.
        kinds_RT = (slots_T - starts_R1 + 1).clamp_(0, self._num_kinds - 1)
        if len(self.trees) > 1:
            kinds_RT += trees_R1 * self._num_kinds
        return self._visible[:num_nodes, kinds_RT].transpose(0, 1)[:, None]

    def depths(self, trees_R: Tensor, num_nodes: int) -> Tensor:
        """Return the distance [R, num_nodes] of each node from the token chosen last."""
        return self._depths[trees_R, :num_nodes]

    def embeddings(self, trees_R: Tensor, num_nodes: int) -> Tensor:
        """Return the prompt embedding [R, num_nodes] of each node, from 1; 0 for tokens."""
        return self._embeddings[trees_R, :num_nodes]

    def tokens(
        self,
        trees_R: Tensor,
        num_nodes: int,
        pending_R1: Tensor,
        child_id: int,
        proposals_RMK: Tensor | None,
    ) -> Tensor:
        """Return the token [R, num_nodes] of each node.

        `proposals_RMK` has the candidates by distance and rank. Prompt and padding nodes get the
        child token, which is never chosen.
        """
        sources_RQ = self._sources[trees_R, :num_nodes]
        columns = [pending_R1, torch.full_like(pending_R1, child_id)]
        if proposals_RMK is None:
            sources_RQ = sources_RQ.clamp(max=_CHILD)
        else:
            columns.append(proposals_RMK.flatten(1))
        return torch.cat(columns, 1).gather(1, sources_RQ)

    def tokens_after(
        self,
        trees_R: Tensor,
        num_nodes: int,
        pending_R1: Tensor,
        child_id: int,
        after_VK: Tensor,
    ) -> Tensor:
        """Return the token [R, num_nodes] of each node if candidates depend on their parent's.

        `after_VK` has the candidates after each token of the vocabulary. Other nodes get the child
        token, which is never chosen.
        """
        tokens_RQ = self.tokens(trees_R, num_nodes, pending_R1, child_id, None)
        candidates_RQ = self._sources[trees_R, :num_nodes] >= _NUM_FIXED
        parents_RQ = self._parents[trees_R, :num_nodes]
        ranks_RQ = self._ranks[trees_R, :num_nodes]
        for _ in range(max(tree.depth for tree in self.trees)):
            before_RQ = tokens_RQ.gather(1, parents_RQ)
            tokens_RQ = torch.where(candidates_RQ, after_VK[before_RQ, ranks_RQ], tokens_RQ)
        return tokens_RQ

    def _sources_of(self, tree: CandidateTree) -> list[int]:
        candidates = range(1, 1 + tree.num_candidates)
        return [
            _PENDING,
            *(
                _NUM_FIXED + (tree.depths[n] - 1) * self.num_ranks + tree.ranks[n]
                for n in candidates
            ),
        ]

    @staticmethod
    def _padded(
        width: int, device: torch.device, padding: int, rows: Sequence[Sequence[int]]
    ) -> Tensor:
        return torch.tensor(
            [[*row, *[padding] * (width - len(row))] for row in rows], device=device
        )
