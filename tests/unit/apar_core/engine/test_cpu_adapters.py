"""Dense kernels of LoRA against a loop over rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from vllm.lora.layers import LoRAMapping

from apar_core.engine.cpu_adapters import CPUAdapters

PLACES, RANK, INPUTS, SLICES = 3, 4, 6, (5, 3)
SCALE = 0.5


def kernels(adapter_ids: list[int]) -> CPUAdapters:
    found = CPUAdapters(max_num_batched_tokens=64, max_batches=16, device="cpu")
    mapping = LoRAMapping(tuple(adapter_ids), tuple(adapter_ids), is_prefill=False)
    # Adapter n is in place n - 1, and no place is empty.
    found.update_metadata(mapping, list(range(1, PLACES + 1)), PLACES, 100)
    return found


def changed(y_NO: Tensor, x_ND: Tensor, a: Tensor, b: Tensor, adapter_ids: list[int]) -> Tensor:
    expected = y_NO.clone()
    for row, adapter_id in enumerate(adapter_ids):
        if adapter_id:
            first, second = a[adapter_id - 1, 0], b[adapter_id - 1, 0]
            expected[row] += SCALE * (second @ (first @ x_ND[row]))
    return expected


@given(st.lists(st.integers(0, PLACES), min_size=1, max_size=9), st.integers(0, 2**16))
def test_each_row_is_changed_by_its_own_adapter_only(adapter_ids: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_rows = len(adapter_ids)
    x = random(num_rows, INPUTS)
    a = tuple(random(PLACES, 1, RANK, INPUTS) for _ in SLICES)
    b = tuple(random(PLACES, 1, size, RANK) for size in SLICES)
    y = random(num_rows, sum(SLICES))
    expected = torch.cat(
        [
            changed(part, x, first, second, adapter_ids)
            for part, first, second in zip(y.split(SLICES, dim=1), a, b, strict=True)
        ],
        dim=1,
    )
    with_adapters = kernels(adapter_ids)

    with_adapters.add_lora_linear(y, x, a, b, SCALE, SLICES)

    torch.testing.assert_close(y, expected)

    logits = random(num_rows, SLICES[0])
    expected = changed(logits, x, a[0], b[0], adapter_ids)
    with_adapters.add_lora_logits(logits, x, a[0], b[0], SCALE)
    torch.testing.assert_close(logits, expected)

    # vLLM passes each token's row of the first factor.
    gathered, embeddings = random(num_rows, RANK), random(num_rows, SLICES[0])
    identity = torch.eye(RANK).expand(PLACES, 1, RANK, RANK) / SCALE
    expected = changed(embeddings, gathered, identity, b[0], adapter_ids)
    with_adapters.add_lora_embedding(embeddings, gathered, b[0])
    torch.testing.assert_close(embeddings, expected)
