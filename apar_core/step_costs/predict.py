"""Predicted step costs of a model on a GPU: published tables for some, else a roofline.

Nothing here was measured by this project on the GPU that it names. The `source` of the returned
costs says where the numbers come from and how far other sources disagree; docs/step-costs.md has
the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

from apar_core.errors import StepCostsError
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.gpus import GPUS, Gpu
from apar_core.step_costs.models import DTYPE_BYTES, ModelSize

# Roofline, calibrated to the published tables below.
WEIGHTS_BANDWIDTH_SHARE = 0.72
"""Share of the memory bandwidth at which a step with few tokens reads the weights."""
FLOPS_SHARE = 0.65
"""Share of the arithmetic that large matrix products reach."""

# Beside matrix products and attention.
LAUNCH_LAYER_S = 1e-3 / 32
"""Element-wise kernels and launches per layer: 1 ms for the 32 layers of Llama-7B, an assumption.
Vidur's profile of Llama-2-7B has 0.8 ms of element-wise kernels on an A100, 0.6 ms on an H100."""
KERNELS_PER_LAYER = 10
"""Two normalizations, four matrix products, rotary embedding, KV write, attention, activation."""
KERNEL_LAUNCH_S = 4e-6
"""Launching one kernel outside a CUDA graph: an assumption, and as if nothing hid it."""
LARGEST_GRAPH = 512
"""Tokens of vLLM 0.32's largest CUDA graph with 256 or more `max_num_seqs` (config/vllm.py)."""
ALL_REDUCE_S, LINK_BANDWIDTH = 6e-6, 110e9
"""Latency of an all-reduce in a CUDA graph, and bytes per second out of a GPU with NVLink. Against
AIConfigurator's tables of vLLM's all-reduce over 2 to 8 GPUs, 4 KB to 16 MB, this errs by -53 to
+18% on an A100 and -25 to +65% on H100 and H200."""
COPY_BANDWIDTH_SHARE = 0.8
"""Share of the memory bandwidth for copied blocks and the sampler's logits: an assumption."""
LOGIT_BYTES = 10
"""Memory traffic per logit of greedy sampling: read 16 bits, write and read 32 bits."""

# Family attention. No GPU has measured it: see docs/family-attention.md.
GROUP_PASS_LAYER_S = 20e-6
"""A further attention call per layer: the constant part of the calls in AIConfigurator's tables of
vLLM's FlashAttention, 20 to 23 us. Kernels that follow each other in a CUDA graph may take less."""
MERGE_LAYER_S = 5e-6
"""The kernel that merges the results of two passes, per layer: an assumption."""

# Memory.
MEMORY_SHARE = 0.9
"""Share of a GPU's memory for vLLM. vLLM calls it `gpu_memory_utilization`."""
OVERHEAD_BYTES = 2e9
"""Activations, CUDA graphs, context and the input embedding on each GPU: an assumption."""
BLOCK_SIZE = 16

# The engine core's Python: CPU time of vLLM 0.32's `schedule` and `update_from_output` with this
# project's scheduler in virtual time, 17,000 steps with forks of the structured trace with 8 to 350
# requests at once. Without forks 33 us and 12.0 us per row. Output processing runs elsewhere.
HOST_BASE_S, HOST_ROW_S = 35e-6, 15.7e-6
HOST_SOURCE = "vLLM 0.32 and Python 3.11 on one core of an AMD EPYC (2026-11-22)"


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """Speed of a GPU's decoding attention.

    bandwidth_share: of the memory bandwidth, for reading the KV cache.
    row_head_s: seconds per layer, row and KV head beside it.
    """

    bandwidth_share: float
    row_head_s: float


# Least squares of relative errors on AIConfigurator's tables of vLLM's FlashAttention: 128 to 2,100
# rows of 8 KV heads (so 32 to 525 rows of Llama-7B) with contexts of 128 to 1,024 tokens. Median
# error of single entries 4%, 3%, 3%. The constant part, 20 to 23 us per layer, is in
# `LAUNCH_LAYER_S`.
_A100_ATTENTION = AttentionSpeed(0.82, 0.0050e-6)
_ATTENTION = {
    "a100-80gb": _A100_ATTENTION,
    "h100": AttentionSpeed(0.98, 0.0095e-6),
    "h200": AttentionSpeed(0.99, 0.0134e-6),
}


# Milliseconds of all matrix products of a step by tokens, `lm_head` included. Source: NVIDIA
# AIConfigurator at 095f58a5, tables of bfloat16 matrix products in vLLM 0.14 (A100) and 0.24 (H100,
# H200), added up over the layers. Shapes between those of the tables are interpolated. Where the
# sum falls with more tokens, by up to 11%, the larger one is kept.
_A100_TOKENS = (1, 16, 32, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
_HOPPER_TOKENS = tuple(tokens for tokens in _A100_TOKENS if tokens != 384)
_MILLISECONDS: dict[tuple[str, str], tuple[float, ...]] = {
    ("Llama-7B", "a100-80gb"): (
        9.275, 9.455, 9.591, 9.752, 11.12, 11.13, 15.63, 16.52, 16.62,
        22.13, 28.75, 39.43, 54.06, 102.6, 204.8, 408.5,
    ),
    ("Llama-7B", "h100"): (
        4.748, 5.448, 5.448, 5.448, 5.448, 5.448, 5.648, 5.925, 6.301,
        8.659, 12.34, 16.64, 33.83, 68.47, 145.3,
    ),
    ("Llama-7B", "h200"): (
        3.722, 3.994, 4.032, 4.033, 4.135, 4.135, 4.576, 5.286, 5.286,
        8.545, 12.73, 16.86, 34.66, 71.62, 149.3,
    ),
    ("Llama-13B", "a100-80gb"): (
        18.28, 18.28, 18.33, 19.02, 20.79, 21.28, 32.26, 32.28, 32.83,
        41.52, 53.82, 80.95, 97.13, 187, 373.8, 736.3,
    ),
    ("Llama-13B", "h100"): (
        8.954, 10.26, 10.38, 10.7, 10.7, 10.78, 10.78, 10.78, 11.72,
        16.67, 24.01, 32.43, 64.57, 139.5, 290.7,
    ),
    ("Llama-13B", "h200"): (
        6.766, 7.433, 7.495, 7.623, 7.623, 7.905, 8.337, 8.968, 9.858,
        16.62, 23.65, 32.58, 65.08, 141.5, 301,
    ),
    ("Llama-3-8B", "a100-80gb"): (
        10.39, 10.39, 10.52, 10.52, 12.01, 12.36, 16.84, 17.76, 17.88,
        23.73, 31.57, 45.73, 59.39, 113.6, 226.7, 458.9,
    ),
    ("Llama-3-8B", "h100"): (
        5.569, 6.122, 6.175, 6.322, 6.322, 6.322, 6.322, 6.56, 6.984,
        9.857, 14.05, 19.13, 38.24, 76.01, 165,
    ),
    ("Llama-3-8B", "h200"): (
        4.118, 4.473, 4.535, 4.678, 4.678, 4.708, 5.073, 5.617, 5.855,
        9.746, 14.6, 19.5, 42.24, 83.89, 167.6,
    ),
}  # fmt: skip
# (layers, hidden size, intermediate size, KV heads) of the models in the tables.
_TABLE_MODELS = {
    (32, 4096, 11_008, 32): "Llama-7B",
    (40, 5120, 13_824, 40): "Llama-13B",
    (32, 4096, 14_336, 8): "Llama-3-8B",
}
_H100_CAVEAT = (
    "Vidur's profile of Llama-2-7B on an H100 is 40 to 50% above this at 256 tokens and more, and "
    "20 to 30% above at 1,024 and more"
)
_ROOFLINE_CAVEAT = (
    "against the published tables of Llama-7B, -13B and -3-8B it errs by -8 to +19% up to 64 "
    "tokens, -37 to +1% at 96 to 192, -13 to +6% at 256, and +9 to +41% at 384 and more"
)


def step_costs(
    model: ModelSize, gpu: Gpu, tensor_parallel: int = 1, block_size: int = BLOCK_SIZE
) -> StepCosts:
    """Return the predicted step costs of a model on a GPU, or on several with NVLink.

    The time of matrix products is a published table's if there is one for the model's dimensions,
    the GPU and one GPU per replica, else that of `roofline`. Raises StepCostsError for a
    `tensor_parallel` below 1.
    """
    _check_tensor_parallel(tensor_parallel)
    table = published_table(model, gpu) if tensor_parallel == 1 else None
    matrix_s = roofline(model, gpu, tensor_parallel) if table is None else table
    attention = _ATTENTION.get(gpu.name, _A100_ATTENTION)
    kv_shards = model.kv_shards(tensor_parallel)
    kv_bytes = model.kv_bytes_per_token / kv_shards
    copied_s = 1 / (gpu.bandwidth * COPY_BANDWIDTH_SHARE)
    launch_s = LAUNCH_LAYER_S * model.layers
    if tensor_parallel > 1:
        launch_s += 2 * model.layers * ALL_REDUCE_S
    attention_row_s = attention.row_head_s * model.layers * model.kv_heads / kv_shards
    # A merge reads two results and writes one, in 16 bits, with two logarithms in 32 bits per head.
    heads = int(model.config["num_attention_heads"]) / tensor_parallel
    merged_bytes = model.layers * heads * (3 * 2 * model.head_dim + 2 * 4)
    name = f"{model.name} on {gpu.name}"
    return StepCosts(
        name=name if tensor_parallel == 1 else f"{name} x {tensor_parallel}",
        kind="predicted",
        source=_source(model, gpu, tensor_parallel, is_roofline=table is None),
        matrix_s=matrix_s,
        attended_token_s=kv_bytes / (gpu.bandwidth * attention.bandwidth_share),
        row_s=attention_row_s + LOGIT_BYTES * model.vocab_size / tensor_parallel * copied_s,
        launch_s=launch_s,
        copied_block_s=2 * block_size * kv_bytes * copied_s,
        host_base_s=HOST_BASE_S,
        host_row_s=HOST_ROW_S,
        largest_graph=LARGEST_GRAPH,
        eager_launch_s=launch_s + KERNELS_PER_LAYER * model.layers * KERNEL_LAUNCH_S,
        group_pass_s=(GROUP_PASS_LAYER_S + MERGE_LAYER_S) * model.layers,
        group_s=attention_row_s,
        grouped_row_s=merged_bytes * copied_s,
    )


def published_table(model: ModelSize, gpu: Gpu) -> tuple[tuple[int, float], ...] | None:
    """Return the published seconds of a step's matrix products by tokens, None without a table.

    There are tables for some models' dimensions with 16-bit weights, and for some GPUs with their
    own bandwidth and arithmetic.
    """
    milliseconds = _MILLISECONDS.get((_table_model(model), gpu.name))
    known = GPUS.get(gpu.name)
    if milliseconds is None or known is None:
        return None
    if (gpu.bandwidth, gpu.flops) != (known.bandwidth, known.flops):
        return None
    numbers = _A100_TOKENS if gpu.name == "a100-80gb" else _HOPPER_TOKENS
    return tuple((tokens, each / 1000) for tokens, each in zip(numbers, milliseconds, strict=True))


def _table_model(model: ModelSize) -> str:
    """Return the model whose tables hold for a model's dimensions, "" without any."""
    if model.num_experts > 1 or DTYPE_BYTES[model.dtype] != 2:
        return ""
    inner = int(model.config["intermediate_size"])
    return _TABLE_MODELS.get((model.layers, model.hidden_size, inner, model.kv_heads), "")


def roofline(model: ModelSize, gpu: Gpu, tensor_parallel: int = 1) -> tuple[tuple[int, float], ...]:
    """Return the seconds of a step's matrix products by tokens, from the data sheet.

    The larger of reading the weights and of the arithmetic. Several GPUs also exchange each
    token's hidden state twice per layer. Arithmetic is in 16 bits also for narrower weights. A
    mixture of experts reads the experts that its tokens hit when each expert is equally likely.
    """
    bandwidth = gpu.bandwidth * WEIGHTS_BANDWIDTH_SHARE * tensor_parallel
    flops = gpu.flops * FLOPS_SHARE * tensor_parallel
    element = DTYPE_BYTES[model.dtype]
    dense = model.matrix_parameters - model.expert_parameters
    active = dense + model.expert_parameters * model.used_experts / model.num_experts
    exchanged = 2 * model.layers * model.hidden_size * 2 * 2 * (1 - 1 / tensor_parallel)

    def seconds(tokens: int) -> float:
        missed = (1 - model.used_experts / model.num_experts) ** tokens
        read = element * (dense + model.expert_parameters * (1 - missed))
        arithmetic = 2 * active * tokens
        return max(read / bandwidth, arithmetic / flops) + exchanged * tokens / LINK_BANDWIDTH

    # The number of tokens from which on arithmetic takes longer, all experts being read.
    knee = element * model.matrix_parameters / bandwidth * flops / (2 * active)
    points = {1, max(1, int(knee)), int(knee) + 1}
    if model.num_experts > 1:
        points |= {2**power for power in range(int(knee).bit_length())}
    return tuple((tokens, seconds(tokens)) for tokens in sorted(points))


def kv_tokens(
    model: ModelSize,
    gpu: Gpu,
    tensor_parallel: int = 1,
    memory_share: float = MEMORY_SHARE,
    block_size: int = BLOCK_SIZE,
) -> int:
    """Return the tokens of KV cache that fit beside the weights, in whole blocks.

    Raises StepCostsError for a model that does not fit.
    """
    _check_tensor_parallel(tensor_parallel)
    usable = memory_share * gpu.memory_bytes
    weights = model.matrix_parameters * DTYPE_BYTES[model.dtype] / tensor_parallel
    left = usable - weights - OVERHEAD_BYTES
    kv_bytes = model.kv_bytes_per_token / model.kv_shards(tensor_parallel)
    blocks = int(left // (kv_bytes * block_size))
    if blocks < 1:
        raise StepCostsError(
            f"{model.name} does not fit: {weights / 1e9:.1f} GB of weights and "
            f"{OVERHEAD_BYTES / 1e9:g} GB beside them on each of {tensor_parallel} {gpu.name}, of "
            f"which {usable / 1e9:.1f} GB may be used; take larger GPUs or more tensor parallelism"
        )
    return blocks * block_size


def _source(model: ModelSize, gpu: Gpu, tensor_parallel: int, *, is_roofline: bool) -> str:
    parts = ["predicted, not measured"]
    if is_roofline:
        parts.append(
            f"matrix products from a roofline of {gpu.name}: the larger of the weights at "
            f"{WEIGHTS_BANDWIDTH_SHARE:.0%} of {gpu.bandwidth / 1e9:,.0f} GB/s and the arithmetic "
            f"at {FLOPS_SHARE:.0%} of {gpu.flops / 1e12:,.0f} TFLOP/s; {_ROOFLINE_CAVEAT}"
        )
    else:
        parts.append(
            f"matrix products of {_table_model(model)} on {gpu.name} from NVIDIA AIConfigurator's "
            "tables per operator, added up"
        )
        if gpu.name == "h100":
            parts.append(_H100_CAVEAT)
    if model.num_experts > 1:
        parts.append("each expert is taken to be equally likely")
    if DTYPE_BYTES[model.dtype] == 1:
        parts.append("arithmetic in 16 bits")
    if tensor_parallel > 1:
        parts.append(
            f"two all-reduces per layer, each {1e6 * ALL_REDUCE_S:g} us and its data at "
            f"{LINK_BANDWIDTH / 1e9:g} GB/s"
        )
    attention = _ATTENTION.get(gpu.name)
    parts.append(
        f"KV cache read at {(attention or _A100_ATTENTION).bandwidth_share:.0%} of the bandwidth "
        + ("(fit to AIConfigurator's tables)" if attention else "(as on an A100)")
    )
    parts.append(f"engine core's time per step and row measured with {HOST_SOURCE}")
    return "; ".join(parts)


def _check_tensor_parallel(tensor_parallel: int) -> None:
    if tensor_parallel < 1:
        raise StepCostsError(f"tensor_parallel must be 1 or more, not {tensor_parallel}")
