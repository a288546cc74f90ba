"""What our logits processors share: a state for each sequence of the batch that they concern."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

Row = TypeVar("Row")


class RowProcessor(LogitsProcessor, Generic[Row]):
    """Keeps `rows`, the states of the sequences concerned, by their place in the batch."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, Row] = {}
        self.device = device

    @abstractmethod
    def new_row(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Row | None:
        """State of a sequence that joins the batch, or None; `output_ids` is vLLM's and grows."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept everything: requests that do not concern a processor have no row."""

    def is_argmax_invariant(self) -> bool:
        """The argmax may change, so greedy sampling needs the processor too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's changes of the batch."""

        def new_row(params: Any, prompt_ids: Any, output_ids: Any, *_: Any) -> Row | None:
            return self.new_row(params, prompt_ids, output_ids)

        process_dict_updates(self.rows, batch_update, new_row)
