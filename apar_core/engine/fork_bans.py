"""Logits processor: where a control token may not be sampled.

[Child] is forced by the engine and never sampled (paper, section 2.2). [Fork] right after [Fork] or
[Child] would open a paragraph without a root. A request that may not fork samples neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.sampling_params import SamplingParams

from apar_core.engine.row_processor import RowProcessor
from apar_core.fork_parameters import ForkParameters


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of the batch; `output_ids` is vLLM's own list and grows."""

    parameters: ForkParameters
    starts_banned: bool
    output_ids: Sequence[int]

    def bans_fork(self) -> bool:
        """Whether the next token of the sequence must not be a fork token."""
        if not self.parameters.enabled:
            return True
        if not self.output_ids:
            return self.starts_banned
        return self.output_ids[-1] == self.parameters.fork_id


class ForkBans(RowProcessor[Row]):
    """Bans control tokens for all sequences of a batch at once."""

    def new_row(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Row | None:
        """Concerns every sequence of a checkpoint with control tokens."""
        parameters = ForkParameters.from_extra_args(params.extra_args)
        if parameters is None:
            return None
        # The prompt of a thread that is resumed may end with a fork token that it has sampled.
        starts_banned = prompt_ids is not None and prompt_ids[-1:] in (
            [parameters.child_id],
            [parameters.fork_id],
        )
        return Row(parameters, starts_banned, output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Set banned logits [num_rows, vocabulary] to minus infinity, in place."""
        if not self.rows:
            return logits
        # All rows come from one checkpoint, so they share their control tokens.
        parameters = next(iter(self.rows.values())).parameters
        logits[:, parameters.child_id] = -torch.inf
        banned = [index for index, row in self.rows.items() if row.bans_fork()]
        if banned:
            rows = torch.tensor(banned, device=self.device)
            logits[rows, parameters.fork_id] = -torch.inf
        return logits


def bad_words(parameters: ForkParameters) -> list[list[int]]:
    """The same bans as bad words: token sequences that may not be completed."""
    if not parameters.enabled:
        return [[parameters.child_id], [parameters.fork_id]]
    # A child's first token cannot be told here: its child token is part of the prompt.
    return [[parameters.child_id], [parameters.fork_id, parameters.fork_id]]
