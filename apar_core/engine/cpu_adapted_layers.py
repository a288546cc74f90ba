"""Layers of a model on CPUs whose requests have adapters: merged, and opaque to the compiler.

Decoding on a CPU is bound by reading weights and by the number of operations. An adapter beside its
layer adds four of them to each layer: SmolLM2-135M takes 75 ms instead of 37 ms a step of one row.
So a small model keeps a second copy of each weight with an adapter merged into it, for steps whose
rows all have that adapter. A step without adapters uses the base weight alone, and only steps that
mix both add products to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from apar_core.engine.cpu_adapters import CPUAdapters
from apar_core.vllm_names import (
    BaseLayerWithLoRA,
    BaseLinearLayerWithLoRA,
    ColumnParallelLinear,
    LogitsProcessorWithLoRA,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    VocabParallelEmbeddingWithLoRA,
    direct_register_custom_op,
    get_forward_context,
)

MOST_MERGED_BYTES = 1 << 30
"""Size of all merged copies up to which a model has them."""

_PLAIN = (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
# Columns of a packed weight that are read back at once.
_READ_COLUMNS = 256


class AdaptedLayer:
    """What a layer with adapters computes; the compiler sees one operation.

    Which adapters a step has is known only when it runs, and vLLM compiles a model once, for all
    steps. That is why it does not compile models with adapters on CPUs.
    """

    def __init__(self, layer: Any, name: str, *, num_outputs: int, dtype: torch.dtype) -> None:
        self.num_outputs, self.dtype = num_outputs, dtype
        self._layer, self._name = layer, name

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            outputs: Tensor = torch.ops.vllm.apar_adapted_layer(x, bias, self._name)
            return outputs
        return self.run(x, bias)

    def run(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's outputs for the rows of this step."""
        raise NotImplementedError


class AdaptedEmbedding(AdaptedLayer):
    """Embeddings of tokens [N] with adapters: [N, D]."""

    def __init__(self, layer: Any, name: str) -> None:
        base = layer.base_layer
        super().__init__(layer, name, num_outputs=base.embedding_dim, dtype=base.weight.dtype)
        self._forward: Callable[[Tensor], Tensor] = layer.forward

    def run(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what vLLM's layer returns."""
        return self._forward(x)


class AdaptedLinear(AdaptedLayer):
    """A linear layer with adapters, [N, D] to [N, O], with merged copies if `merges`."""

    def __init__(self, layer: Any, name: str, *, dtype: torch.dtype, merges: bool) -> None:
        super().__init__(layer, name, num_outputs=sum(layer.output_slices), dtype=dtype)
        self._merges = merges
        self._apply: Callable[[Tensor, Tensor | None], Tensor] = layer.apply
        self._method: Any = layer.base_layer.quant_method
        # Adapters by their place, merged when a step first needs them.
        self._merged: dict[int, nn.Module] = {}
        self._reset = layer.reset_lora

    def run(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs, from one product if all rows of the step have the same adapter."""
        weights = self._weights_of_all_rows() if self._merges else None
        if weights is None:
            return self._apply(x, bias)
        outputs: Tensor = self._method.apply(weights, x, bias)
        return outputs

    def reset(self, index: int) -> None:
        """Remove the adapter at a place, as vLLM does before it sets another."""
        self._merged.pop(index, None)
        self._reset(index)

    def _weights_of_all_rows(self) -> Any:
        """Return what all rows of the step are multiplied by; None if they differ."""
        kernels: CPUAdapters = self._layer.punica_wrapper
        if not kernels.changes_tokens:
            return self._layer.base_layer
        if (place := kernels.place_of_all_tokens) is None:
            return None
        if (merged := self._merged.get(place)) is None:
            merged = self._merged[place] = self._merge(place)
        return merged

    def _merge(self, place: int) -> nn.Module:
        layer = self._layer
        changes = [
            second[place, 0].float() @ first[place, 0].float()
            for first, second in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        ]
        weight_OD = self._weight().float() + torch.cat(changes)
        merged = nn.Module()
        merged.weight = nn.Parameter(weight_OD.to(self.dtype), requires_grad=False)
        self._method.process_weights_after_loading(merged)
        return merged

    def _weight(self) -> Tensor:
        """Return the base weight [O, D], which vLLM keeps only in its kernel's own order.

        It is the product with an identity matrix, which rounds nothing.
        """
        base, num_inputs = self._layer.base_layer, self._layer.input_size
        identity_DD = torch.eye(num_inputs, dtype=self.dtype)
        parts = [self._method.apply(base, rows) for rows in identity_DD.split(_READ_COLUMNS)]
        return torch.cat(parts).T.contiguous()


def adapt_layers(model: nn.Module, static_forward_context: dict[str, Any]) -> None:
    """Replace what a model's layers with adapters compute, once its adapters have their room.

    `static_forward_context` is that of the engine's compilation settings. A model that has other
    layers with adapters is not compiled.
    """
    layers: dict[str, Any] = {
        name: each for name, each in model.named_modules() if isinstance(each, BaseLayerWithLoRA)
    }
    if not layers:
        return
    dtype = next(model.parameters()).dtype
    merges = _num_merged_bytes(layers.values(), dtype) <= MOST_MERGED_BYTES
    opaque = True
    for name, layer in layers.items():
        key = f"{name}.apar_adapted"
        if isinstance(layer, BaseLinearLayerWithLoRA):
            linear = AdaptedLinear(layer, key, dtype=dtype, merges=merges and _can_merge(layer))
            vars(layer).update(apply=linear, reset_lora=linear.reset)
            static_forward_context[key] = linear
        elif isinstance(layer, VocabParallelEmbeddingWithLoRA):
            embedding = AdaptedEmbedding(layer, key)
            vars(layer).update(forward=embedding)
            static_forward_context[key] = embedding
        elif not isinstance(layer, LogitsProcessorWithLoRA):
            opaque = False
    if not opaque:
        for module in model.modules():
            if hasattr(module, "do_not_compile"):
                vars(module).update(do_not_compile=True)


def _can_merge(layer: Any) -> bool:
    return (
        type(layer.base_layer) in _PLAIN
        and type(layer.base_layer.quant_method) is UnquantizedLinearMethod
        # Not so if the adapter's factors are sharded.
        and sum(each.shape[2] for each in layer.lora_b_stacked) == sum(layer.output_slices)
        and all(each.shape[3] == layer.input_size for each in layer.lora_a_stacked)
    )


def _num_merged_bytes(layers: Any, dtype: torch.dtype) -> int:
    return (
        sum(
            layer.lora_a_stacked[0].shape[0] * layer.input_size * sum(layer.output_slices)
            for layer in layers
            if isinstance(layer, BaseLinearLayerWithLoRA) and _can_merge(layer)
        )
        * dtype.itemsize
    )


def _adapted_layer(x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    layer: AdaptedLayer = get_forward_context().no_compile_layers[name]
    return layer.run(x, bias)


def _adapted_layer_shape(x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    layer: AdaptedLayer = get_forward_context().no_compile_layers[name]
    rows = x.shape[:-1] if isinstance(layer, AdaptedLinear) else x.shape
    return torch.empty((*rows, layer.num_outputs), dtype=layer.dtype)


direct_register_custom_op("apar_adapted_layer", _adapted_layer, fake_impl=_adapted_layer_shape)
