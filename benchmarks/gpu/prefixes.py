"""GPU check of shared prefixes by their length: what each method takes to read them.

Steps of 256 rows in families of 4, with prefixes of 128 to 1,024 tokens, for models with and
without grouped KV heads. The baseline is one pass of vLLM's FlashAttention, which reads each row's
blocks by itself. FlashInfer's cascade is measured where it is installed. See `check.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from apar_core.attention.families import Families
from benchmarks.gpu.family_kernel import (
    Problem,
    num_layers,
    reference,
    relative_error,
    seconds_of,
    solving,
    use_interpreter,
)
from benchmarks.gpu.family_steps import BLOCK_SIZE, Shape
from benchmarks.gpu.torch_checks import CheckError, Found, Setup, run

if TYPE_CHECKING:
    from apar_core.attention.gpu_backends import DevicePlan, FamilyFlashImpl

MODELS = {"Llama-7B": Shape(32, 32, 128, 32), "Llama-3-8B": Shape(32, 8, 128, 32)}
PREFIXES = (128, 256, 512, 1024)
_BACKENDS = "apar_core.attention.gpu_backends"
_FA_UTILS = "vllm.v1.attention.backends.fa_utils"
# vLLM's `flash_attn_max_num_splits_for_cuda_graph`.
_GRAPH_SPLITS = 32
_FAMILIES, _ROWS, _SUFFIX = 64, 4, 128
_WORKSPACE_BYTES = 128 << 20
# Two roundings of bf16 partial results, and a third of the merged one.
_TOLERANCE = 1.6e-2
# Rows that are compared with float64.
_COMPARED = 8
ONE_PASS, TWO_PASSES, KERNEL, CASCADE = "one pass", "two passes", "our kernel", "FlashInfer"


@dataclass(frozen=True)
class Rows:
    """A step: the problems of its layers, whose rows of a family lie beside each other.

    caches: keys and values of each layer as vLLM has them, [blocks, KV heads, block, 2 * D].
    """

    layers: Sequence[Problem]
    caches: Sequence[Tensor]
    shape: Shape
    prefix: int

    @property
    def families(self) -> Families:
        """The families of the step, on the device."""
        found = self.layers[0].families
        assert found is not None
        return found


def make_rows(shape: Shape, prefix: int, setup: Setup, dtype: torch.dtype) -> Rows:
    """Return a step with random numbers, of so many layers that no cache of the GPU holds them."""
    num_families = 2 if setup.is_tiny else _FAMILIES
    rows = num_families * _ROWS
    full, own = prefix // BLOCK_SIZE, _SUFFIX // BLOCK_SIZE
    # Block 0 is vLLM's null block.
    shared = 1 + torch.arange(num_families * full).view(num_families, full)
    single = 1 + shared.numel() + torch.arange(rows * own).view(rows, own)
    blocks = int(single.max()) + 1
    table = torch.cat([shared.repeat_interleave(_ROWS, 0), single], 1).int().to(setup.device)
    lengths = torch.full((rows,), prefix + _SUFFIX - 3, dtype=torch.int32, device=setup.device)
    ints = {
        "rows": torch.arange(rows), "starts": torch.arange(num_families + 1) * _ROWS,
        "prefix_blocks": torch.full((num_families,), full),
        "row_prefix_blocks": torch.full((rows,), full),
    }  # fmt: skip
    families = Families(**{name: value.int().to(setup.device) for name, value in ints.items()})
    layer_bytes = 2 * blocks * BLOCK_SIZE * shape.kv_heads * shape.head_size * dtype.itemsize
    layers, caches = [], []
    for _ in range(num_layers(layer_bytes, setup)):
        packed = torch.randn(
            (blocks, BLOCK_SIZE, shape.kv_heads, 2 * shape.head_size), device=setup.device,
            dtype=dtype,
        )  # fmt: skip
        query = torch.randn((rows, shape.heads, shape.head_size), device=setup.device, dtype=dtype)
        keys, values = packed.split(shape.head_size, dim=-1)
        scale = shape.head_size**-0.5
        layers.append(Problem(query, keys, values, table, lengths, families, scale))
        caches.append(packed.transpose(1, 2))
    return Rows(layers, caches, shape, prefix)


def flash_version(shape: Shape, setup: Setup) -> int:
    """Return the version of FlashAttention that vLLM chooses; 2 where there is none."""
    return _flash_impl(shape, setup).vllm_flash_attn_version or 2


def _flash_impl(shape: Shape, setup: Setup) -> FamilyFlashImpl:
    from apar_core.attention.gpu_backends import FamilyFlashImpl

    impl = FamilyFlashImpl(
        shape.heads, shape.head_size, shape.head_size**-0.5, shape.kv_heads, None, None,
        kv_cache_dtype="auto",
    )  # fmt: skip
    if not setup.has_gpu:
        impl.vllm_flash_attn_version = 2
    return impl


def one_pass(step: Rows, outputs: Sequence[Tensor], setup: Setup) -> Callable[[], None]:
    """Return a function that calls FlashAttention as vLLM does for decoding rows."""
    attend = import_module(_BACKENDS).flash_attention()
    version = flash_version(step.shape, setup)
    rows = len(outputs[0])
    starts = torch.arange(rows + 1, device=setup.device, dtype=torch.int32)
    longest = int(step.layers[0].lengths.max())
    # As vLLM has it in full CUDA graphs: one schedule for all layers, made before the step.
    ahead: dict[str, Any] = {}
    if version == 3:
        ahead = {"num_splits": _GRAPH_SPLITS}
        ahead["scheduler_metadata"] = import_module(_FA_UTILS).get_scheduler_metadata(
            batch_size=rows, max_seqlen_q=1, max_seqlen_k=longest,
            num_heads_q=step.shape.heads, num_heads_kv=step.shape.kv_heads,
            headdim=step.shape.head_size, cache_seqlens=step.layers[0].lengths,
            qkv_dtype=step.layers[0].query.dtype, cu_seqlens_q=starts, page_size=BLOCK_SIZE,
            causal=True, window_size=(-1, -1), num_splits=_GRAPH_SPLITS,
        )  # fmt: skip

    def solve() -> None:
        for layer, output in zip(step.layers, outputs, strict=True):
            attend(
                q=layer.query, k=layer.keys, v=layer.values, out=output, cu_seqlens_q=starts,
                max_seqlen_q=1, seqused_k=layer.lengths, max_seqlen_k=longest,
                block_table=layer.table, causal=True, softmax_scale=layer.scale,
                return_softmax_lse=True, fa_version=version, **ahead,
            )  # fmt: skip

    return solve


def two_passes(step: Rows, outputs: Sequence[Tensor], setup: Setup) -> Callable[[], None]:
    """Return a function that reads families as our backend does with FlashAttention."""
    impl = _flash_impl(step.shape, setup)
    plan = _device_plan(step)
    starts = torch.arange(len(outputs[0]) + 1, device=setup.device, dtype=torch.int32)

    def solve() -> None:
        for layer, cache, output in zip(step.layers, step.caches, outputs, strict=True):
            impl._attend_twice(layer.query, cache, plan, starts, 1, output)

    return solve


def _device_plan(step: Rows) -> DevicePlan:
    from apar_core.attention.gpu_backends import on_device
    from apar_core.attention.plan import StepPlan

    layer = step.layers[0]
    on_host = {name: value.cpu() for name, value in vars(step.families).items()}
    families = Families(**on_host)
    blocks = step.prefix // BLOCK_SIZE
    plan = StepPlan(
        families=families,
        seq_lens=layer.lengths.cpu(),
        tokens=families.rows.long(),
        leaders=families.rows[families.starts[:-1].long()].long(),
        max_family_rows=_ROWS,
        max_prefix_blocks=blocks,
        max_suffix_blocks=layer.table.shape[1] - blocks,
    )
    return on_device(plan, layer.table, layer.lengths, BLOCK_SIZE)


def our_kernel(step: Rows, outputs: Sequence[Tensor], setup: Setup) -> Callable[[], None]:
    """Return a function that reads families with our Triton kernel."""
    return solving(step.layers, None, outputs)


def cascade(step: Rows, outputs: Sequence[Tensor], setup: Setup) -> Callable[[], None]:
    """Return a function that reads families with FlashInfer's cascade of two levels."""
    layer, families = step.layers[0], step.families
    full, rows = step.prefix // BLOCK_SIZE, len(outputs[0])
    leaders = families.rows[families.starts[:-1].long()].long()
    own = layer.table.shape[1] - full

    def ints(count: int, each: int) -> Tensor:
        return each * torch.arange(count + 1, device=setup.device, dtype=torch.int32)

    def last(count: int, tokens: int) -> Tensor:
        return torch.full((count,), tokens, device=setup.device, dtype=torch.int32)

    number = families.num_families
    wrapper = import_module("flashinfer").MultiLevelCascadeAttentionWrapper(
        2, torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=setup.device), "NHD"
    )
    wrapper.plan(
        [families.starts, ints(rows, 1)],
        [ints(number, full), ints(rows, own)],
        [layer.table[leaders, :full].flatten(), layer.table[:, full:].flatten()],
        [last(number, BLOCK_SIZE), last(rows, (_SUFFIX - 3 - 1) % BLOCK_SIZE + 1)],
        step.shape.heads, step.shape.kv_heads, step.shape.head_size, BLOCK_SIZE,
        q_data_type=layer.query.dtype,
    )  # fmt: skip
    caches = [(each.keys.contiguous(), each.values.contiguous()) for each in step.layers]

    def solve() -> None:
        for each, cache, output in zip(step.layers, caches, outputs, strict=True):
            output.copy_(wrapper.run(each.query, cache))

    return solve


Method = Callable[[Rows, Sequence[Tensor], Setup], Callable[[], None]]
METHODS: Mapping[str, Method] = {
    ONE_PASS: one_pass, TWO_PASSES: two_passes, KERNEL: our_kernel, CASCADE: cascade,
}  # fmt: skip


def error_of(step: Rows, output: Tensor) -> float:
    """Return the relative error of the first rows of the first layer against float64."""
    layer = step.layers[0]
    part = replace(
        layer, query=layer.query[:_COMPARED], table=layer.table[:_COMPARED],
        lengths=layer.lengths[:_COMPARED], families=None,
    )  # fmt: skip
    return relative_error(output[:_COMPARED], reference(part))


def prefixes(setup: Setup) -> Found:
    """Compare each method with float64, and measure its time by the prefix."""
    dtype = torch.bfloat16 if setup.has_gpu else torch.float32
    models: Mapping[str, Shape] = MODELS
    lengths: Sequence[int] = PREFIXES
    if not setup.has_gpu:
        from tests.fakes.flash_attention import flash_attn_varlen_func

        backends: Any = import_module(_BACKENDS)
        backends.flash_attention = lambda: flash_attn_varlen_func
    if setup.is_tiny:
        models, lengths = {"tiny": Shape(4, 2, 64, 2)}, (32, 64)
    found: Found = {"points": [], "left_out": {}, "summary": []}
    if find_spec("flashinfer") is None:
        found["left_out"][CASCADE] = "not installed"
    wrong = []
    # The longest prefix last, for all models: it takes the most memory.
    for prefix in lengths:
        for model, shape in models.items():
            step = make_rows(shape, prefix, setup, dtype)
            point: Found = {"model": model, "prefix": prefix, "rows": len(step.layers[0].lengths),
                            "seconds": {}, "errors": {}}  # fmt: skip
            for name, method in METHODS.items():
                if name in found["left_out"]:
                    continue
                outputs = [torch.full_like(each.query, float("nan")) for each in step.layers]
                try:
                    solve = method(step, outputs, setup)
                    solve()
                    error = error_of(step, outputs[0])
                    seconds = seconds_of(solve, setup) / len(step.layers)
                except (RuntimeError, OSError, ImportError, TypeError, ValueError) as problem:
                    if name != CASCADE:
                        raise
                    # A rival that does not run here is no failure of ours.
                    found["left_out"][name] = f"{type(problem).__name__}: {problem}"[:300]
                    continue
                point["errors"][name], point["seconds"][name] = error, seconds
                if not error <= _TOLERANCE:
                    wrong.append(f"{name}, {model}, {prefix} tokens: {error:.1e}")
            found["points"].append(point)
            times = ", ".join(
                f"{name} {1e6 * seconds:.0f}" for name, seconds in point["seconds"].items()
            )
            found["summary"].append(
                f"{model}, {point['rows']} rows, prefix {prefix}: "
                + (f"us a layer: {times}" if setup.has_gpu else "times of a CPU mean nothing")
            )
            setup.keep(found)
    for name, reason in found["left_out"].items():
        found["summary"].append(f"{name} was not measured: {reason}")
    if wrong:
        setup.keep(found)
        raise CheckError(f"error above {_TOLERANCE}: {'; '.join(wrong[:4])}")
    return found


if __name__ == "__main__":
    if "cpu" in sys.argv:
        use_interpreter()
    run((prefixes,))
