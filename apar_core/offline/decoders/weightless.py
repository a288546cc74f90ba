"""Proposers that need no weights: prompt lookup and Token Recycling.

Dimensions: R rows, M distances, C nodes of a row with a chosen token, V vocabulary, K ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from apar_core.offline.decoders.proposer import Asked, Proposer
from apar_core.offline.speculation.acceptance import AcceptanceTable

LONGEST_NGRAM, SHORTEST_NGRAM = 3, 2

LOOKUP_TABLE = AcceptanceTable(probabilities=((0.6,),) * 8, source="assumed")
"""Acceptance that the chains of prompt lookup are sized for, once there is a match."""

RECYCLING_TABLE = AcceptanceTable(
    probabilities=((0.45, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01),) * 5, source="assumed"
)
"""Acceptance that the trees of Token Recycling are sized for."""


class LookupProposer(Proposer):
    """Prompt lookup: what followed the last tokens where they stood before.

    The last `LONGEST_NGRAM` tokens are searched in the thread's path, then fewer, down to
    `SHORTEST_NGRAM`. The last place counts. If there is none, the answer's other threads are
    searched. Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding).
    """

    reads_text = True

    def __init__(self, num_distances: int) -> None:
        self._most = num_distances
        self._found: list[list[int]] = []

    def states(self, paths: Sequence[list[int]], others: Sequence[list[int]]) -> list[int]:
        """Look the rows up; return how many tokens were found for each."""
        self._found = [self._looked_up(_text(path), others) for path in paths]
        return [len(found) for found in self._found]

    def _looked_up(self, path: str, others: Sequence[list[int]]) -> list[int]:
        for text in chain((path,), map(_text, reversed(others))):
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


def _text(token_ids: Sequence[int]) -> str:
    """Return token ids as characters, in which a search is fast."""
    return "".join(map(chr, token_ids))


class RecyclingProposer(Proposer):
    """Token Recycling: after each token, what the model found likeliest after it the last time.

    The tokens that passes computed and did not accept count as well, and what was learned stays for
    the next answer, unless samples would depend on it. Source: arXiv 2408.08696.
    """

    def __init__(self, vocab_size: int, num_ranks: int, device: torch.device) -> None:
        self.after_VK = torch.zeros((vocab_size, num_ranks), dtype=torch.int64, device=device)

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
