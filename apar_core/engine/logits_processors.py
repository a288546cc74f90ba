"""Bans of control tokens and replay for vLLM's V1 model runner, which CPUs use.

`logits_processors_v2.py` has the same two for the V2 runner.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from apar_core.engine.replay import script_of
from apar_core.fork_parameters import ForkParameters
from apar_core.vllm_names import BatchUpdate, LogitsProcessor, process_dict_updates

Row = TypeVar("Row")

CERTAIN_LOGIT = 1e30
"""Above any logit, so that no other token is ever sampled, and still finite when divided by the
smallest temperature. Filling the row with minus infinity would cost as much as sampling."""


class RowProcessor(LogitsProcessor, Generic[Row]):
    """Logits processor with a state for each sequence that it concerns.

    `rows` holds the states by index in the batch.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, Row] = {}
        self.device = device

    @abstractmethod
    def new_row(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Row | None:
        """Return the state of a new sequence, or None; vLLM's list `output_ids` will grow."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept all parameters."""

    def is_argmax_invariant(self) -> bool:
        """Return False: the argmax may change, so greedy sampling needs the processor too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply vLLM's changes of the batch to the rows."""

        def new_row(params: Any, prompt_ids: Any, output_ids: Any, *_: Any) -> Row | None:
            return self.new_row(params, prompt_ids, output_ids)

        process_dict_updates(self.rows, batch_update, new_row)


@dataclass(slots=True)
class _BanRow:
    """One sequence; `output_ids` is vLLM's own list and grows."""

    parameters: ForkParameters
    starts_banned: bool
    output_ids: Sequence[int]
    calls: bool = False

    def bans_fork(self) -> bool:
        """Return whether the next token of a sequence that may fork must not be a fork token."""
        if not self.output_ids:
            return self.starts_banned
        last_id = self.output_ids[-1]
        self.calls = self.calls or last_id in self.parameters.call_ids
        return self.calls or last_id == self.parameters.fork_id


class ForkBans(RowProcessor[_BanRow]):
    """Bans the sampling of control tokens.

    Tokens that the engine forces are never sampled (APAR, section 2.2, for the child token). A fork
    token right after a control token would open a paragraph without text. A thread that may not
    fork, or is within a tool call, samples no fork token. Only the first thread calls tools: its
    text is what follows a call in reading order.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._is_pin_memory = is_pin_memory
        # Indices of rows that never fork, and rows that may, until the batch changes.
        self._unforked: torch.Tensor | None = None
        self._children: torch.Tensor | None = None
        self._forking: dict[int, _BanRow] = {}

    def new_row(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> _BanRow | None:
        """Return a row for every sequence of a checkpoint with fork tokens."""
        parameters = ForkParameters.from_extra_args(params.extra_args)
        if parameters is None or parameters.blocks is not None:
            return None
        # The prompt of a resumed thread may end with a fork token that it has sampled.
        starts_banned = prompt_ids is not None and any(map(parameters.is_control, prompt_ids[-1:]))
        calls = not set(parameters.call_ids).isdisjoint(output_ids)
        return _BanRow(parameters, starts_banned, output_ids, calls)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply vLLM's changes of the batch to the rows."""
        super().update_state(batch_update)
        if batch_update is None:
            return
        self._forking = {i: row for i, row in self.rows.items() if row.parameters.may_fork}
        unforked = [index for index in self.rows if index not in self._forking]
        self._unforked = self._on_device(unforked) if unforked else None
        children = [index for index, row in self.rows.items() if row.parameters.thread_path]
        self._children = self._on_device(children) if children else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Set banned logits [num_rows, vocabulary] to minus infinity, in place.

        Copies indices to the device only in a step after a fork.
        """
        if not self.rows:
            return logits
        # All rows belong to one checkpoint, so they share their control tokens.
        parameters = next(iter(self.rows.values())).parameters
        for banned_id in parameters.banned_ids:
            logits[:, banned_id].fill_(-torch.inf)
        if self._children is not None:
            for call_id in parameters.call_ids:
                logits[:, call_id].index_fill_(0, self._children, -torch.inf)
        fork_logits = logits[:, parameters.fork_id]
        if self._unforked is not None:
            fork_logits.index_fill_(0, self._unforked, -torch.inf)
        banned = [index for index, row in self._forking.items() if row.bans_fork()]
        if banned:
            fork_logits.index_fill_(0, self._on_device(banned), -torch.inf)
        return logits

    def _on_device(self, indices: list[int]) -> torch.Tensor:
        """Copy row indices without waiting for the device."""
        on_host = torch.tensor(indices, pin_memory=self._is_pin_memory)
        return on_host.to(self.device, non_blocking=True)


def bad_words(parameters: ForkParameters) -> list[list[int]]:
    """Return the bans of `ForkBans` as bad words: sequences that may not be completed.

    The first token of a child is not covered, because its seed is part of the prompt.
    """
    fork_id = parameters.fork_id
    fork_ban = [fork_id, fork_id] if parameters.may_fork else [fork_id]
    return [*([banned_id] for banned_id in parameters.banned_ids), fork_ban]


@dataclass(frozen=True, slots=True)
class _ReplayRow:
    """One sequence; `output_ids` is vLLM's own list and grows."""

    token_ids: Sequence[int]
    output_ids: Sequence[int]


class Replay(RowProcessor[_ReplayRow]):
    """Makes each replayed sequence generate the tokens of its thread: see `replay.py`."""

    def new_row(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> _ReplayRow | None:
        """Return a row for each sequence whose request has a replay."""
        script = script_of(params.extra_args)
        return None if script is None else _ReplayRow(script, output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Raise one logit of each replayed row of [num_rows, vocabulary], in place."""
        rows: list[int] = []
        chosen: list[int] = []
        for index, row in self.rows.items():
            position = len(row.output_ids)
            if position < len(row.token_ids):
                rows.append(index)
                chosen.append(row.token_ids[position])
        if rows:
            indices = torch.tensor([rows, chosen], device=self.device)
            logits[indices[0], indices[1]] = CERTAIN_LOGIT
        return logits
