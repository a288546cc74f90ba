"""Layers of a model on CPUs whose requests have adapters: merged, and opaque to the compiler.

Decoding on a CPU is bound by reading weights and by the number of operations. An adapter beside its
layer adds four of them to each layer: SmolLM2-135M takes 75 ms instead of 37 ms a step of one row.
So a small model keeps a second copy of each weight with an adapter merged into it, for steps whose
rows all have that adapter. A step without adapters uses the base weight alone, and only steps that
mix both add products to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from apar_core.engine.cpu_adapters import CPUAdapters
from apar_core.vllm_names import (
    BaseLayerWithLoRA,
    BaseLinearLayerWithLoRA,
    ClassificationHeadWithLoRA,
    ColumnParallelLinear,
    LogitsProcessorWithLoRA,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    VocabParallelEmbeddingWithLoRA,
    direct_register_custom_op,
)

MOST_MERGED_BYTES = 1 << 30
"""Size of all merged copies up to which a model has them."""
STEPS_BEFORE_MERGING = 32
"""Steps that an adapter runs unmerged, counting those in which all rows use it. Merging takes about
as long as these, so it does not pay for an adapter that is soon replaced by another."""

# Behind the part of a model that vLLM compiles.
_UNCOMPILED = (LogitsProcessorWithLoRA, ClassificationHeadWithLoRA)
_PLAIN = (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
# Columns of a packed weight that are read back at once.
_READ_COLUMNS = 256
_layers: WeakValueDictionary[str, AdaptedLayer] = WeakValueDictionary()
_numbers = count()


class AdaptedLayer(ABC):
    """Compute a layer with adapters; the compiler sees one operation.

    Which adapters a step has is known only when it runs, and vLLM compiles a model once, for all
    steps. That is why it does not compile models with adapters on CPUs.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        # The same in each process that builds the same model, for the compiler's cache.
        self._name = f"adapted-{next(_numbers)}"
        _layers[self._name] = self

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            outputs: Tensor = torch.ops.vllm.apar_adapted_layer(x, bias, self._name)
            return outputs
        return self.run(x, bias)

    @abstractmethod
    def run(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's outputs for the rows of this step."""

    @abstractmethod
    def empty_outputs(self, x: Tensor) -> Tensor:
        """Return an uninitialized tensor of the outputs' shape and type, for the compiler."""


class AdaptedEmbedding(AdaptedLayer):
    """Embeddings of tokens [N] with adapters: [N, D]."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self._forward: Callable[[Tensor], Tensor] = layer.forward

    def run(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what vLLM's layer returns."""
        return self._forward(x)

    def empty_outputs(self, x: Tensor) -> Tensor:
        """Return an uninitialized tensor for the embeddings of `x`."""
        base = self._layer.base_layer
        return torch.empty((*x.shape, base.embedding_dim), dtype=base.weight.dtype)


class AdaptedLinear(AdaptedLayer):
    """A linear layer with adapters, [N, D] to [N, O], with merged copies if `merges`."""

    def __init__(self, layer: Any, *, merges: bool) -> None:
        super().__init__(layer)
        self._merges = merges
        self._apply: Callable[[Tensor, Tensor | None], Tensor] = layer.apply
        self._method: Any = layer.base_layer.quant_method
        # By the adapter's place.
        self._merged: dict[int, nn.Module] = {}
        self._num_steps: Counter[int] = Counter()
        self._reset = layer.reset_lora

    def run(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs, from one product if all rows of the step have the same adapter."""
        weights = self._weights_of_all_rows() if self._merges else None
        if weights is None:
            return self._apply(x, bias)
        outputs: Tensor = self._method.apply(weights, x, bias)
        return outputs

    def empty_outputs(self, x: Tensor) -> Tensor:
        """Return an uninitialized tensor for the outputs of `x`."""
        return x.new_empty((*x.shape[:-1], sum(self._layer.output_slices)))

    def reset(self, index: int) -> None:
        """Remove the adapter at a place, as vLLM does before it sets another."""
        self._merged.pop(index, None)
        self._num_steps.pop(index, None)
        self._reset(index)

    def _weights_of_all_rows(self) -> Any:
        """Return what all rows of the step are multiplied by; None if adapters are added."""
        kernels: CPUAdapters = self._layer.punica_wrapper
        if not kernels.changes_tokens:
            return self._layer.base_layer
        if (place := kernels.place_of_all_tokens) is None:
            return None
        if place not in self._merged:
            self._num_steps[place] += 1
            if self._num_steps[place] <= STEPS_BEFORE_MERGING:
                return None
            self._merged[place] = self._merge(place)
        return self._merged[place]

    def _merge(self, place: int) -> nn.Module:
        layer = self._layer
        changes = [
            second[place, 0].float() @ first[place, 0].float()
            for first, second in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        ]
        weight_OD = self._weight().float() + torch.cat(changes)
        merged = nn.Module()
        dtype = layer.base_layer.params_dtype
        merged.weight = nn.Parameter(weight_OD.to(dtype), requires_grad=False)
        self._method.process_weights_after_loading(merged)
        return merged

    def _weight(self) -> Tensor:
        """Return the base weight [O, D], which vLLM keeps only in its kernel's own order.

        It is the product with an identity matrix, which rounds nothing.
        """
        base, num_inputs = self._layer.base_layer, self._layer.input_size
        identity_DD = torch.eye(num_inputs, dtype=base.params_dtype)
        parts = [self._method.apply(base, rows) for rows in identity_DD.split(_READ_COLUMNS)]
        return torch.cat(parts).T.contiguous()


def adapt_layers(model: nn.Module) -> None:
    """Replace what a model's layers with adapters compute, once its adapters have their room.

    A model that has other layers with adapters than linear ones and embeddings is not compiled.
    """
    layers: list[Any] = [
        each
        for each in model.modules()
        if isinstance(each, BaseLayerWithLoRA) and not isinstance(each, _UNCOMPILED)
    ]
    linear: list[Any] = [
        each
        for each in layers
        if isinstance(each, BaseLinearLayerWithLoRA) and not _is_sharded(each)
    ]
    embeddings: list[Any] = [
        each for each in layers if isinstance(each, VocabParallelEmbeddingWithLoRA)
    ]
    merges = sum(map(_merged_bytes, filter(_can_merge, linear))) <= MOST_MERGED_BYTES
    for layer in linear:
        adapted = AdaptedLinear(layer, merges=merges and _can_merge(layer))
        vars(layer).update(apply=adapted, reset_lora=adapted.reset)
    for layer in embeddings:
        vars(layer).update(forward=AdaptedEmbedding(layer))
    if len(linear) + len(embeddings) < len(layers):
        for module in model.modules():
            if hasattr(module, "do_not_compile"):
                vars(module).update(do_not_compile=True)


def _is_sharded(layer: Any) -> bool:
    """Whether the factors of a layer's adapters are split over several processes."""
    return bool(layer.lora_config.fully_sharded_loras and layer.tp_size > 1)


def _can_merge(layer: Any) -> bool:
    base = layer.base_layer
    return type(base) in _PLAIN and type(base.quant_method) is UnquantizedLinearMethod


def _merged_bytes(layer: Any) -> int:
    """Return the size of a layer's copies, if each place has an adapter."""
    num_weights = layer.input_size * sum(layer.output_slices)
    size: int = layer.lora_config.max_loras * num_weights * layer.base_layer.params_dtype.itemsize
    return size


def _adapted_layer(x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    return _layers[name].run(x, bias)


def _adapted_layer_shape(x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    return _layers[name].empty_outputs(x)


direct_register_custom_op("apar_adapted_layer", _adapted_layer, fake_impl=_adapted_layer_shape)
