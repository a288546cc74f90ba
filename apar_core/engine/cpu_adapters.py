"""LoRA on CPUs with one matrix product per adapter, instead of a copy of its weights per token.

vLLM's PyTorch kernels gather the factors of each token's adapter before they multiply. A step of T
tokens then reads and writes T copies of them, more than the model's own weights from a few tokens
on. These multiply all rows of a step by the factors of each adapter in it. They also leave rows
without an adapter as they are; vLLM's add the last adapter's (its pull request 48421).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apar_core.vllm_names import PunicaWrapperCPU


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step that one adapter changes.

    `place` is the adapter's index in the stacked factors. `mask_N1` has a 1 for each of its rows
    and a 0 for others; None if all N rows are its own.
    """

    place: int
    mask_N1: Tensor | None

    def only(self, rows_ND: Tensor) -> Tensor:
        """Return rows with zeros in those of others."""
        return rows_ND if self.mask_N1 is None else rows_ND * self.mask_N1.to(rows_ND.dtype)


def adapter_rows(places_N: Tensor) -> list[AdapterRows]:
    """Return the rows of each adapter; `places_N` has -1 for rows without one."""
    found = torch.unique(places_N).tolist()
    if len(found) == 1:
        return [AdapterRows(place, None) for place in found if place >= 0]
    return [AdapterRows(place, (places_N == place).unsqueeze(1)) for place in found if place >= 0]


class CPUAdapters(PunicaWrapperCPU):
    """vLLM's kernels of LoRA, as dense products.

    Shapes: N rows, R ranks, D inputs, O outputs, P places of adapters. Factors are stacked as
    [P, 1, R, D] and [P, 1, O, R].
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._of_tokens: Sequence[AdapterRows] = ()
        self._of_samples: Sequence[AdapterRows] = ()

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Override of vLLM's method, called when the rows of a step are known."""
        super().update_metadata(*args, **kwargs)
        self._of_tokens = adapter_rows(self.token_lora_indices)
        self._of_samples = adapter_rows(self.sampler_indices)

    @property
    def changes_tokens(self) -> bool:
        """Whether any row of this step has an adapter."""
        return bool(self._of_tokens)

    @property
    def place_of_all_tokens(self) -> int | None:
        """The place of the adapter that all rows of this step have, if they have the same."""
        match self._of_tokens:
            case [AdapterRows(place, None)]:
                return place
        return None

    def add_shrink(
        self,
        y: Any,
        x: Tensor,
        lora_a_stacked: Sequence[Tensor],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Write `x @ a * scale` into each buffer [N, R], zero where a row has no adapter."""
        x_ND = x.view(-1, x.shape[-1])
        for buffer, first in zip(y, lora_a_stacked, strict=True):
            _shrink(buffer.view(-1, buffer.shape[-1]), x_ND, first, scale, self._of_tokens)

    def add_expand(
        self,
        y: Tensor,
        x: Any,
        lora_b_stacked: Sequence[Tensor],
        output_slices: Sequence[int],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Add `x @ b` to each slice of `y` [N, O], or write it there without `add_inputs`."""
        y_NO = y.view(-1, y.shape[-1])
        start = offset_start
        for buffer, second, size in zip(x, lora_b_stacked, output_slices, strict=True):
            part_NO = y_NO[:, start : start + size]
            if not add_inputs:
                part_NO.zero_()
            _expand(part_NO, buffer, second, self._of_tokens)
            start += size

    def add_lora_embedding(
        self,
        y: Tensor,
        x: Tensor,
        lora_b_stacked: Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Add the change of the tokens' embeddings; `x` [N, R] has their rows of the factor a."""
        self.add_expand(y, (x,), (lora_b_stacked,), (y.shape[-1],), add_inputs=add_inputs)

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        *,
        buffer: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the change of the logits of the rows that are sampled."""
        x_ND = x.view(-1, x.shape[-1])
        between_NR = torch.zeros((len(x_ND), lora_b_stacked.shape[-1]))
        _shrink(between_NR, x_ND, lora_a_stacked, scale, self._of_samples)
        _expand(y.view(-1, y.shape[-1]), between_NR, lora_b_stacked, self._of_samples)


def _shrink(
    y_NR: Tensor, x_ND: Tensor, stacked: Tensor, scale: float, adapters: Sequence[AdapterRows]
) -> None:
    y_NR.zero_()
    for rows in adapters:
        first_RD = stacked[rows.place].squeeze(0)
        y_NR[:, : len(first_RD)] += rows.only(x_ND @ first_RD.T.to(x_ND.dtype)) * scale


def _expand(y_NO: Tensor, x_NR: Tensor, stacked: Tensor, adapters: Sequence[AdapterRows]) -> None:
    for rows in adapters:
        second_OR = stacked[rows.place].squeeze(0)
        # The adapter and the model may pad their outputs differently.
        num_outputs = min(len(second_OR), y_NO.shape[1])
        y_NO[:, :num_outputs].addmm_(
            rows.only(x_NR).to(y_NO.dtype), second_OR[:num_outputs].T.to(y_NO.dtype)
        )
