"""Logits processor: where a control token may not be sampled.

[Child] is forced by the engine and never sampled (paper, section 2.2). [Fork] right after [Fork] or
[Child] would open a paragraph without a root. A request that may not fork samples neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from apar_core.engine.row_processor import RowProcessor
from apar_core.fork_parameters import ForkParameters


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of the batch; `output_ids` is vLLM's own list and grows."""

    parameters: ForkParameters
    starts_banned: bool
    output_ids: Sequence[int]

    def bans_fork(self) -> bool:
        """Whether the next token of a sequence that may fork must not be a fork token."""
        if not self.output_ids:
            return self.starts_banned
        return self.output_ids[-1] == self.parameters.fork_id


class ForkBans(RowProcessor[Row]):
    """Bans control tokens for all sequences of a batch at once."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._is_pin_memory = is_pin_memory
        # Rows that never fork, known until the batch changes; and those that may.
        self._unforked: torch.Tensor | None = None
        self._forking: dict[int, Row] = {}

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

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's changes of the batch."""
        super().update_state(batch_update)
        if batch_update is None:
            return
        self._forking = {i: row for i, row in self.rows.items() if row.parameters.enabled}
        unforked = [index for index in self.rows if index not in self._forking]
        self._unforked = self._on_device(unforked) if unforked else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Set banned logits [num_rows, vocabulary] to minus infinity, in place.

        Copies nothing to the device but in a step that follows a fork.
        """
        if not self.rows:
            return logits
        # All rows come from one checkpoint, so they share their control tokens.
        parameters = next(iter(self.rows.values())).parameters
        logits[:, parameters.child_id].fill_(-torch.inf)
        fork_logits = logits[:, parameters.fork_id]
        if self._unforked is not None:
            fork_logits.index_fill_(0, self._unforked, -torch.inf)
        banned = [index for index, row in self._forking.items() if row.bans_fork()]
        if banned:
            fork_logits.index_fill_(0, self._on_device(banned), -torch.inf)
        return logits

    def _on_device(self, indices: list[int]) -> torch.Tensor:
        """Row numbers, copied without waiting for the device."""
        on_host = torch.tensor(indices, pin_memory=self._is_pin_memory)
        return on_host.to(self.device, non_blocking=True)


def bad_words(parameters: ForkParameters) -> list[list[int]]:
    """The same bans as bad words: token sequences that may not be completed."""
    if not parameters.enabled:
        return [[parameters.child_id], [parameters.fork_id]]
    # A child's first token cannot be told here: its child token is part of the prompt.
    return [[parameters.child_id], [parameters.fork_id, parameters.fork_id]]
