"""Logits processor: where a control token may not be sampled.

[Child] is forced by the engine and never sampled (paper, section 2.2). [Fork] right after [Fork] or
[Child] would open a paragraph without a root. A request that may not fork samples neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from apar_core.fork_parameters import ForkParameters


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of the batch; `output_ids` is vLLM's own list and grows."""

    parameters: ForkParameters
    starts_as_child: bool
    output_ids: Sequence[int]

    def bans_fork(self) -> bool:
        """Whether the next token of the sequence must not be a fork token."""
        if not self.parameters.enabled:
            return True
        if not self.output_ids:
            return self.starts_as_child
        return self.output_ids[-1] == self.parameters.fork_id


class ForkBans(LogitsProcessor):
    """Bans control tokens for all sequences of a batch at once."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, Row] = {}
        self._device = device

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept everything: the parameters are written by this project's own input processor."""

    def is_argmax_invariant(self) -> bool:
        """Bans change the argmax, so greedy sampling needs them too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's changes of the batch."""
        process_dict_updates(self._rows, batch_update, _new_row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Set banned logits [num_rows, vocabulary] to minus infinity, in place."""
        if not self._rows:
            return logits
        # All rows come from one checkpoint, so they share their control tokens.
        parameters = next(iter(self._rows.values())).parameters
        logits[:, parameters.child_id] = -torch.inf
        banned = [index for index, row in self._rows.items() if row.bans_fork()]
        if banned:
            rows = torch.tensor(banned, device=self._device)
            logits[rows, parameters.fork_id] = -torch.inf
        return logits


def _new_row(
    params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int], *_: Any
) -> Row | None:
    parameters = ForkParameters.from_extra_args(params.extra_args)
    if parameters is None:
        return None
    starts_as_child = prompt_ids is not None and prompt_ids[-1:] == [parameters.child_id]
    return Row(parameters, starts_as_child, output_ids)


def bad_words(parameters: ForkParameters) -> list[list[int]]:
    """The same bans as bad words: token sequences that may not be completed."""
    if not parameters.enabled:
        return [[parameters.child_id], [parameters.fork_id]]
    # A child's first token cannot be told here: its child token is part of the prompt.
    return [[parameters.child_id], [parameters.fork_id, parameters.fork_id]]
