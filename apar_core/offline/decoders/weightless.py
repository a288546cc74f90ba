"""Proposers that need no weights: prompt lookup and Token Recycling.

Dimensions: R rows, M distances, C nodes of a row with a chosen token, V vocabulary, K ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apar_core.offline.decoders.proposer import Asked
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.candidate_tree import CandidateTree

LONGEST_NGRAM, SHORTEST_NGRAM = 3, 2

LOOKUP_TABLE = AcceptanceTable(probabilities=((0.6,),) * 8, source="assumed")
"""Acceptance that the chains of prompt lookup are sized for, once there is a match."""

RECYCLING_TABLE = AcceptanceTable(
    probabilities=((0.45, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01),) * 5, source="assumed"
)
"""Acceptance that the trees of Token Recycling are sized for."""


class LookupProposer:
    """Prompt lookup: what followed the last tokens where they stood before.

    The longest of the last `LONGEST_NGRAM` to `SHORTEST_NGRAM` tokens that stand earlier in the
    thread's path decide, at their last place; if there is none, their last place in another thread
    of the answer. Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding).
    """

    embeddings_ND: Tensor | None = None
    ensemble = 0
    reads_hidden = False
    reads_text = True

    def __init__(self, num_distances: int) -> None:
        self._most = num_distances
        self._found: list[list[int]] = []

    def first_read(self, tree: CandidateTree, node: int) -> int:
        """Return 0: nothing is read."""
        return 0

    def states(self, paths: Sequence[list[int]], others: Sequence[list[int]]) -> list[int]:
        """Look the rows up; return how many tokens were found for each."""
        texts = [_text(other) for other in others]
        self._found = [self._looked_up(_text(path), texts) for path in paths]
        return [len(found) for found in self._found]

    def _looked_up(self, path: str, others: Sequence[str]) -> list[int]:
        for text in (path, *reversed(others)):
            for length in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
                # At least one token must follow, and the path's own end does not count.
                at = text.rfind(path[-length:], 0, len(text) - 1) if len(path) > length else -1
                if at >= 0:
                    start = at + length
                    return [ord(token) for token in text[start : start + self._most]]
        return []

    def tokens(self, asked: Asked) -> Tensor:
        """Return the tokens found, one at each distance."""
        padded = [[*found, *[asked.child_id] * (self._most - len(found))] for found in self._found]
        proposals_RM1 = None
        if padded and asked.depth > 0:
            proposals_RM1 = torch.tensor(padded, device=asked.pending_R1.device)[..., None]
        return asked.stack.tokens(
            asked.trees_R, asked.num_nodes, asked.pending_R1, asked.child_id, proposals_RM1
        )

    def learn(self, tokens_RC: Tensor, logits_RCV: Tensor) -> None:
        """Learn nothing: the text itself is searched."""

    def forget(self) -> None:
        """Do nothing."""


def _text(token_ids: Sequence[int]) -> str:
    """Return token ids as characters, in which a search is fast."""
    return "".join(map(chr, token_ids))


class RecyclingProposer:
    """Token Recycling: after each token, what the model found likeliest after it the last time.

    The tokens that passes computed and did not accept count as well, and what was learned stays for
    the next answer, unless samples would depend on it. Source: arXiv 2408.08696.
    """

    embeddings_ND: Tensor | None = None
    ensemble = 0
    reads_hidden = False
    reads_text = False

    def __init__(self, vocab_size: int, num_ranks: int, device: torch.device) -> None:
        self.after_VK = torch.zeros((vocab_size, num_ranks), dtype=torch.int64, device=device)

    def first_read(self, tree: CandidateTree, node: int) -> int:
        """Return 0: nothing is read."""
        return 0

    def states(self, paths: Sequence[list[int]], others: Sequence[list[int]]) -> list[int]:
        """Raise NotImplementedError: there are candidates after every token."""
        raise NotImplementedError

    def tokens(self, asked: Asked) -> Tensor:
        """Return the candidates, each by the token of its parent."""
        return asked.stack.tokens_after(
            asked.trees_R, asked.num_nodes, asked.pending_R1, asked.child_id, self.after_VK
        )

    def learn(self, tokens_RC: Tensor, logits_RCV: Tensor) -> None:
        """Replace what follows the tokens of a pass."""
        best_NK = logits_RCV.topk(self.after_VK.shape[1], -1).indices.flatten(0, 1)
        # A token's first node counts: the order of a device's writes must not decide.
        tokens_U, place_N = tokens_RC.flatten().unique(return_inverse=True)
        numbers_N = torch.arange(len(place_N), device=place_N.device)
        first_U = torch.full_like(tokens_U, len(place_N))
        first_U.scatter_reduce_(0, place_N, numbers_N, "amin")
        self.after_VK[tokens_U] = best_NK[first_U]

    def forget(self) -> None:
        """Drop what earlier answers have taught."""
        self.after_VK.zero_()
