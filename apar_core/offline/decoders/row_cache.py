"""KV cache whose rows are threads of different lengths, written in place.

Dimensions: R rows in use, Q new tokens a row, T tokens held, N heads, D size of a head.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class RowLayer(CacheLayerMixin):
    """Keys and values of a layer, [rows, tokens, N, D], so a row's prefix is contiguous."""

    def __init__(self, cache: RowCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The cache owns its layers; a strong back reference would delay freeing both.
        self._cache: RowCache = weakref.proxy(cache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the cache's capacity."""
        self.keys = self._zeros(key_states)
        self.values = self._zeros(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [R, N, Q, D] to the slots of this pass; return all rows in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = []
        for stored, new in ((self.keys, key_states), (self.values, value_states)):
            assert stored is not None
            new_rows = new.transpose(1, 2).reshape(-1, *stored.shape[2:])
            stored.view(-1, *stored.shape[2:]).index_copy_(0, self._cache.slots, new_rows)
            used = stored[: self._cache.num_rows, : self._cache.num_tokens]
            held.append(used.transpose(1, 2))
        return held[0], held[1]

    def grow(self) -> None:
        """Copy to tensors of the cache's new capacity."""
        if not self.is_initialized:
            return
        grown = []
        for stored in (self.keys, self.values):
            assert stored is not None
            rows, tokens = stored.shape[:2]
            larger = stored.new_zeros(self._cache.capacity + stored.shape[2:])
            larger[:rows, :tokens] = stored
            grown.append(larger)
        self.keys, self.values = grown

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys for the next pass."""
        return self._cache.num_tokens, 0

    def get_seq_length(self) -> int:
        """Return the length of the longest row."""
        return self._cache.num_tokens

    def get_max_length(self) -> int:
        """Return -1: the cache grows as needed."""
        return -1

    def _zeros(self, like: Tensor) -> Tensor:
        # Zeros, because the value of a masked slot is multiplied by 0, and 0 * NaN is NaN.
        return like.new_zeros((*self._cache.capacity, like.shape[1], like.shape[3]))


class RowCache(Cache):
    """Cache of one answer; `capacity` (rows, tokens) grows by doubling."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.capacity = (1, 64)
        self.num_rows = 0
        self.num_tokens = 0
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        self._device = device
        self._row_layers = [RowLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._row_layers))

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Grow to at least this many rows and tokens; keep the contents."""
        rows, tokens = self.capacity
        if num_rows <= rows and num_tokens <= tokens:
            return
        while rows < num_rows:
            rows *= 2
        while tokens < num_tokens:
            tokens *= 2
        self.capacity = (rows, tokens)
        for layer in self._row_layers:
            layer.grow()

    def begin_pass(self, starts_R1: Tensor, num_rows: int, num_new: int, num_tokens: int) -> None:
        """Set the slots that the next pass writes: `num_new` per row, from its start."""
        self.reserve(num_rows, num_tokens)
        self.num_rows, self.num_tokens = num_rows, num_tokens
        offsets_R1 = torch.arange(num_rows, device=self._device)[:, None] * self.capacity[1]
        new_Q = torch.arange(num_new, device=self._device)
        self.slots = (starts_R1 + offsets_R1 + new_Q).flatten()

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of a row to another row."""
        self.reserve(target + 1, num_tokens)
        for layer in self._row_layers:
            for stored in layer.tensors():
                stored[target, :num_tokens] = stored[source, :num_tokens]

    def copy_slot(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copy one token between (row, slot) places."""
        self.reserve(target[0] + 1, target[1] + 1)
        for layer in self._row_layers:
            for stored in layer.tensors():
                stored[target] = stored[source]

    def keep_slots(self, row: int, start: int, slots: list[int]) -> None:
        """Move a row's tokens from these slots to `start` and following slots."""
        index = torch.tensor(slots, device=self._device)
        for layer in self._row_layers:
            for stored in layer.tensors():
                stored[row, start : start + len(slots)] = stored[row, index]

    def save_row(self, row: int, num_tokens: int) -> list[Tensor]:
        """Return a copy of a row's first tokens, for a waiting thread."""
        return [
            stored[row, :num_tokens].clone()
            for layer in self._row_layers
            for stored in layer.tensors()
        ]

    def load_row(self, row: int, saved: list[Tensor]) -> None:
        """Restore a saved copy to a row."""
        num_tokens = saved[0].shape[0]
        self.reserve(row + 1, num_tokens)
        tensors = [stored for layer in self._row_layers for stored in layer.tensors()]
        for stored, copy in zip(tensors, saved, strict=True):
            stored[row, :num_tokens] = copy
