from __future__ import annotations

import torch
from torch import Tensor

from apar_core.offline.decoders.row_cache import RowCache

NUM_LAYERS, NUM_HEADS, SIZE = 2, 2, 3


def write(cache: RowCache, starts: list[int], values: list[list[float]]) -> list[Tensor]:
    """Write tokens with keys `values` and values ten times as large; return layer 1."""
    numbers = torch.tensor(values)
    num_rows, num_new = numbers.shape
    starts_R1 = torch.tensor([[start] for start in starts])
    cache.begin_pass(starts_R1, num_rows, num_new, max(starts) + num_new)
    states = numbers[:, None, :, None].expand(-1, NUM_HEADS, -1, SIZE)
    held: list[Tensor] = []
    for layer in range(NUM_LAYERS):
        held = list(cache.update(states, states * 10, layer))
    return held


def rows(held: list[Tensor]) -> list[list[float]]:
    """Return the keys of each row, and check that all heads and the values agree."""
    keys, values = held
    assert torch.equal(values, keys * 10)
    assert torch.equal(keys, keys[:, :1, :, :1].expand_as(keys))
    found: list[list[float]] = keys[:, 0, :, 0].tolist()
    return found


def test_rows_of_different_lengths_are_appended_to() -> None:
    cache = RowCache(NUM_LAYERS, torch.device("cpu"))
    write(cache, [0], [[1, 2, 3]])
    cache.copy_row(0, 1, 1)

    held = rows(write(cache, [3, 1], [[4, 5], [6, 7]]))

    assert held == [[1, 2, 3, 4, 5], [1, 6, 7, 0, 0]]


def test_growing_keeps_the_contents() -> None:
    cache = RowCache(NUM_LAYERS, torch.device("cpu"))
    write(cache, [0], [[1, 2, 3]])
    cache.copy_row(0, 4, 3)
    cache.reserve(5, 1000)

    held = rows(write(cache, [3] * 5, [[9]] * 5))

    assert held[0] == held[4] == [1, 2, 3, 9]
    assert cache.capacity[0] >= 5
    assert cache.capacity[1] >= 1000


def test_accepted_tokens_are_compacted() -> None:
    cache = RowCache(NUM_LAYERS, torch.device("cpu"))
    write(cache, [0], [[1, 2, 3, 4, 5, 6]])

    cache.keep_slots(0, 2, [2, 4, 5])

    assert rows(write(cache, [5], [[9]])) == [[1, 2, 3, 5, 6, 9]]


def test_a_token_is_copied_between_rows() -> None:
    cache = RowCache(NUM_LAYERS, torch.device("cpu"))
    write(cache, [0], [[1, 2, 3]])
    cache.copy_row(0, 1, 2)

    cache.copy_slot((0, 2), (1, 2))

    assert rows(write(cache, [3, 3], [[4], [4]])) == [[1, 2, 3, 4]] * 2


def test_a_saved_row_can_be_restored_to_any_row() -> None:
    cache = RowCache(NUM_LAYERS, torch.device("cpu"))
    write(cache, [0], [[1, 2, 3]])
    saved = cache.save_row(0, 2)
    write(cache, [0], [[7, 8, 9]])

    cache.load_row(1, saved)

    assert rows(write(cache, [3, 2], [[4], [5]])) == [[7, 8, 9, 4], [1, 2, 5, 0]]
