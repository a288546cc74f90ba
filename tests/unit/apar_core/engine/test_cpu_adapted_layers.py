"""Layers with merged copies against the layer and its adapters one row at a time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from vllm.lora.layers import LoRAMapping

from apar_core.engine import cpu_adapted_layers
from apar_core.engine.cpu_adapted_layers import AdaptedLinear
from apar_core.engine.cpu_adapters import CPUAdapters
from apar_core.vllm_names import UnquantizedLinearMethod

PLACES, RANK, INPUTS, SLICES = 2, 4, 48, (24, 8)
OUTPUTS = sum(SLICES)


@pytest.fixture(autouse=True)
def merged_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of an adapter adds it, the next ones are merged."""
    monkeypatch.setattr(cpu_adapted_layers, "STEPS_BEFORE_MERGING", 1)


class Layer:
    """What an AdaptedLinear uses of vLLM's layer, with vLLM's product and our kernels."""

    input_size, output_slices = INPUTS, SLICES

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.weight_OD = random(OUTPUTS, INPUTS)
        self.base_layer: Any = SimpleNamespace(
            weight=nn.Parameter(self.weight_OD.clone(), requires_grad=False),
            quant_method=UnquantizedLinearMethod(),
            params_dtype=torch.float32,
        )
        self.base_layer.quant_method.process_weights_after_loading(self.base_layer)
        self.lora_a_stacked = tuple(random(PLACES, 1, RANK, INPUTS) for _ in SLICES)
        self.lora_b_stacked = tuple(random(PLACES, 1, size, RANK) for size in SLICES)
        self.punica_wrapper = CPUAdapters(max_num_batched_tokens=64, max_batches=16, device="cpu")

    def step(self, adapter_ids: list[int]) -> None:
        mapping = LoRAMapping(tuple(adapter_ids), tuple(adapter_ids), is_prefill=False)
        # Adapter n is in place n - 1, and no place is empty.
        self.punica_wrapper.update_metadata(mapping, list(range(1, PLACES + 1)), PLACES, 100)

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = self.base_layer.quant_method.apply(self.base_layer, x, bias)
        self.punica_wrapper.add_lora_linear(
            y, x, self.lora_a_stacked, self.lora_b_stacked, 1.0, self.output_slices
        )
        return y

    def reset_lora(self, index: int) -> None:
        for each in (*self.lora_a_stacked, *self.lora_b_stacked):
            each[index] = 0

    def expected(self, x_ND: Tensor, bias: Tensor, adapter_ids: list[int]) -> Tensor:
        rows = []
        for x_D, adapter_id in zip(x_ND, adapter_ids, strict=True):
            weight_OD = self.weight_OD
            if adapter_id:
                pairs = zip(self.lora_b_stacked, self.lora_a_stacked, strict=True)
                changes = [b[adapter_id - 1, 0] @ a[adapter_id - 1, 0] for b, a in pairs]
                weight_OD = weight_OD + torch.cat(changes)
            rows.append(weight_OD @ x_D + bias)
        return torch.stack(rows)


STEPS = st.lists(
    st.one_of(
        st.lists(st.integers(0, PLACES), min_size=1, max_size=9),
        # Steps whose rows all have the same adapter.
        st.builds(lambda each, n: [each] * n, st.integers(0, PLACES), st.integers(1, 9)),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("merges", [True, False])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, seed=st.integers(0, 2**16))
def test_each_row_is_changed_by_its_own_adapter_only(
    merges: bool, steps: list[list[int]], seed: int
) -> None:
    layer = Layer(seed)
    adapted = AdaptedLinear(layer, merges=merges)
    generator = torch.Generator().manual_seed(seed)
    for adapter_ids in steps:
        x_ND = torch.randn((len(adapter_ids), INPUTS), generator=generator)
        bias_O = torch.randn(OUTPUTS, generator=generator)
        layer.step(adapter_ids)

        torch.testing.assert_close(
            adapted(x_ND, bias_O), layer.expected(x_ND, bias_O, adapter_ids), atol=1e-4, rtol=1e-4
        )


def test_another_adapter_in_its_place_is_merged_anew() -> None:
    layer = Layer(0)
    adapted = AdaptedLinear(layer, merges=True)
    x_ND, bias_O = torch.ones(3, INPUTS), torch.zeros(OUTPUTS)
    layer.step([1, 1, 1])
    added, before = adapted(x_ND, bias_O), adapted(x_ND, bias_O)
    torch.testing.assert_close(before, added, atol=1e-4, rtol=1e-4)

    adapted.reset(0)
    for stacked, values in (
        (layer.lora_a_stacked, Layer(1).lora_a_stacked),
        (layer.lora_b_stacked, Layer(1).lora_b_stacked),
    ):
        for each, other in zip(stacked, values, strict=True):
            each[0] = other[0]

    adapted(x_ND, bias_O)
    after = adapted(x_ND, bias_O)
    torch.testing.assert_close(after, layer.expected(x_ND, bias_O, [1, 1, 1]), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(before, after)


def test_a_base_weight_is_read_back_to_the_bit() -> None:
    layer = Layer(0)
    weight_OD = layer.weight_OD.bfloat16()
    layer.base_layer.weight = nn.Parameter(weight_OD.clone(), requires_grad=False)
    layer.base_layer.params_dtype = torch.bfloat16
    layer.base_layer.quant_method.process_weights_after_loading(layer.base_layer)
    for each in layer.lora_b_stacked:
        each.zero_()
    layer.step([1])
    adapted = AdaptedLinear(layer, merges=True)
    x_ND = torch.randn(5, INPUTS).bfloat16()
    adapted(x_ND)

    merged = adapted(x_ND)

    assert torch.equal(merged, layer.base_layer.quant_method.apply(layer.base_layer, x_ND))
