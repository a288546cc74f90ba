"""Proposers of candidates, and the trees that they fill: Medusa heads and prompt tokens.

`weightless` has those that need no weights.

Dimensions: R rows, N nodes of the last pass, M distances, E members of an ensemble, D hidden size,
V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apar_core.offline.speculation.candidate_tree import CandidateTree, TreeStack
from apar_core.offline.speculation.medusa_heads import MedusaHeads
from apar_core.offline.speculation.prompt_tokens import PromptTokens
from apar_core.offline.speculation.sparse_tree import SparseTree

TreesOfRows = Callable[[int], Sequence[SparseTree]]
"""Function from the number of live rows to the tree of each state 0 to M.

The state of a row is the number of distances at which it has predictions.
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the candidates of a pass are chosen from.

    `trees_R` has the tree of each row in `stack`, `pending_R1` its last token, and `first_read_R`
    the node of the last pass from which its predictions are read. `banned` tokens are not guessed.
    `child_id` fills nodes that are no candidates.
    """

    stack: TreeStack
    trees_R: Tensor
    num_nodes: int
    depth: int
    pending_R1: Tensor
    first_read_R: Tensor
    hidden_ND: Tensor | None
    banned: Tensor
    child_id: int


class Proposer:
    """Chooses the candidates of a pass; the defaults are those of one that needs no inputs.

    `embeddings_ND` are the embeddings [1 + M * E, D] of prompt tokens after a row of zeros, and
    `ensemble` is E. With `reads_hidden`, candidates are read from the hidden states of the last
    pass; with `reads_text`, `states` finds them in the text.
    """

    embeddings_ND: Tensor | None = None
    ensemble: int = 0
    reads_hidden: bool = False
    reads_text: bool = False

    def first_read(self, tree: CandidateTree, node: int) -> int:
        """Return the first node that is read if `node` is the last one accepted."""
        return 0

    def states(self, paths: Sequence[list[int]], others: Sequence[list[int]]) -> list[int]:
        """Return for how many distances each row has candidates, if the text decides it.

        `paths` has the tokens of the rows' whole paths, `others` those of all threads.
        """
        raise NotImplementedError

    def tokens(self, asked: Asked) -> Tensor:
        """Return the token [R, num_nodes] of each node of the pass."""
        raise NotImplementedError

    def learn(self, tokens_RC: Tensor, logits_RCV: Tensor) -> None:
        """Take note of what the model predicts after each token of a pass."""

    def forget(self) -> None:
        """Drop what was learned."""


class HiddenProposer(Proposer):
    """Proposer that predicts from the hidden states of the last pass."""

    reads_hidden = True

    def predict(self, hidden_ND: Tensor, firsts_R: Tensor, num_distances: int) -> Tensor:
        """Return logits [R, num_distances, V] of the tokens after each row's pending token.

        `firsts_R` has the nodes from `first_read`. Distances beyond a row's state are undefined.
        """
        raise NotImplementedError

    def tokens(self, asked: Asked) -> Tensor:
        """Return the likeliest candidates in the nodes of their distance and rank."""
        proposals_RMK = None
        if asked.hidden_ND is not None and asked.depth > 0:
            logits_RMV = self.predict(asked.hidden_ND, asked.first_read_R, asked.depth)
            logits_RMV = logits_RMV.index_fill(-1, asked.banned, -torch.inf)
            num_ranks = asked.stack.num_ranks
            if num_ranks == 1:
                proposals_RMK = logits_RMV.argmax(-1, keepdim=True)
            else:
                proposals_RMK = logits_RMV.topk(num_ranks, -1).indices
        return asked.stack.tokens(
            asked.trees_R, asked.num_nodes, asked.pending_R1, asked.child_id, proposals_RMK
        )


class MedusaProposer(HiddenProposer):
    """Medusa heads: head d reads the node that predicted the pending token."""

    def __init__(self, heads: MedusaHeads, model: Any) -> None:
        self.heads = heads
        self._output_layer = model.get_output_embeddings()

    def first_read(self, tree: CandidateTree, node: int) -> int:
        """Return the node itself."""
        return node

    def predict(self, hidden_ND: Tensor, firsts_R: Tensor, num_distances: int) -> Tensor:
        """Return the heads' logits."""
        logits_HRV: Tensor = self.heads(hidden_ND[firsts_R], self._output_layer)
        return logits_HRV[:num_distances].transpose(0, 1)


class PromptProposer(HiddenProposer):
    """Prompt tokens: those after a node predict what follows the token chosen after it.

    Source: PPD (arXiv 2405.18628), sections 3.1 and 3.2.
    """

    def __init__(self, prompts: PromptTokens, model: Any) -> None:
        self.prompts = copy.deepcopy(prompts).to(device=model.device, dtype=model.dtype)
        self.ensemble = prompts.settings.ensemble
        self._output_layer = model.get_output_embeddings()
        embeddings_ND = self.prompts.embeddings.detach().flatten(0, 1)
        no_prompt_ND = torch.zeros_like(embeddings_ND[:1])
        self.embeddings_ND = torch.cat((no_prompt_ND, embeddings_ND))

    def first_read(self, tree: CandidateTree, node: int) -> int:
        """Return the first prompt token after the node."""
        return tree.first_prompts[node]

    def predict(self, hidden_ND: Tensor, firsts_R: Tensor, num_distances: int) -> Tensor:
        """Return the logits of the prompt tokens, combined over the members of the ensemble."""
        places_N = torch.arange(num_distances * self.ensemble, device=hidden_ND.device)
        # A row in a lower state reads other nodes here, and its tree ignores the result.
        index_RN = (firsts_R[:, None] + places_N).clamp_(max=len(hidden_ND) - 1)
        hidden_RMED = hidden_ND[index_RN].unflatten(1, (num_distances, self.ensemble))
        distances_M = torch.arange(num_distances, device=hidden_ND.device)
        merged_RMED = self.prompts.merged(hidden_RMED, distances_M)
        return self.prompts.combined(self._output_layer(merged_RMED))


class TreeStacks:
    """Tree stacks by number of live rows, built when first needed.

    Child tokens have prompt tokens at all M distances, so that their threads start in state M; at
    fewer if no tree is that deep, because every row is padded to the row that opens a child.
    """

    def __init__(self, trees_of_rows: TreesOfRows, device: torch.device, ensemble: int) -> None:
        self._trees_of_rows = trees_of_rows
        self._device = device
        self._ensemble = ensemble
        self._of_rows: dict[int, TreeStack] = {}
        self._of_states: dict[tuple[SparseTree, ...], TreeStack] = {}

    def of_rows(self, num_rows: int) -> TreeStack:
        """Return the trees for a pass with this many rows."""
        stack = self._of_rows.get(num_rows)
        if stack is None:
            states = tuple(self._trees_of_rows(num_rows))
            stack = self._of_states.get(states)
            if stack is None:
                most = len(states) - 1
                if self._ensemble:
                    most = max(tree.depth for tree in states)
                stack = TreeStack(states, self._device, ensemble=self._ensemble, child_prompts=most)
                self._of_states[states] = stack
            self._of_rows[num_rows] = stack
        return stack
