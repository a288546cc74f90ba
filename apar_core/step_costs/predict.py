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
"""Latency of an all-reduce in a CUDA graph, and bytes per second out of a GPU with NVLink. Within
35% of AIConfigurator's table of vLLM's all-reduce for 2, 4 and 8 GPUs and 4 KB to 16 MB."""
COPY_BANDWIDTH_SHARE = 0.8
"""Share of the memory bandwidth for copied blocks and the sampler's logits: an assumption."""
LOGIT_BYTES = 10
"""Memory traffic per logit of greedy sampling: read 16 bits, write and read 32 bits."""

# Memory.
MEMORY_SHARE = 0.9
"""Share of a GPU's memory for vLLM. vLLM calls it `gpu_memory_utilization`."""
OVERHEAD_BYTES = 2e9
"""Activations, CUDA graphs, context and the input embedding on each GPU: an assumption."""
BLOCK_SIZE = 16

# The engine core's Python: CPU time of vLLM 0.32's `schedule` and `update_from_output` with this
# project's scheduler in virtual time, 13,000 steps of 8 to 350 rows of the structured trace, with
# forks. Without forks it is 33 us and 12.0 us per row. Output processing is in another process.
HOST_BASE_S, HOST_ROW_S = 35e-6, 15.7e-6
HOST_SOURCE = "vLLM 0.32 and Python 3.11 on one core of an AMD EPYC (2026-11-22)"


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """How fast a GPU's decoding attention is.

    bandwidth_share: of the memory bandwidth, for reading the KV cache.
    row_head_s: seconds per layer, row and KV head beside it.
    """

    bandwidth_share: float
    row_head_s: float


# Least squares of relative errors on AIConfigurator's tables of vLLM's FlashAttention: 64 to 1,100
# rows of 8 KV heads (so 16 to 275 rows of Llama-7B) with contexts of 128 to 1,024 tokens. Median
# error of single entries 6%, 6%, 5%. The constant part, 14 to 17 us per layer, is in
# `LAUNCH_LAYER_S`.
_A100_ATTENTION = AttentionSpeed(0.80, 0.0052e-6)
_ATTENTION = {
    "a100-80gb": _A100_ATTENTION,
    "h100": AttentionSpeed(0.94, 0.0113e-6),
    "h200": AttentionSpeed(0.94, 0.0147e-6),
}


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """Milliseconds of all matrix products of a step by tokens, `lm_head` included."""

    model: str
    gpu: str
    milliseconds: dict[int, float]

    @property
    def matrix_s(self) -> tuple[tuple[int, float], ...]:
        """The table in seconds, as `StepCosts` takes it."""
        return tuple((tokens, each / 1000) for tokens, each in self.milliseconds.items())


# Source: NVIDIA AIConfigurator at 095f58a5, tables of bfloat16 matrix products in vLLM 0.14 (A100)
# and 0.24 (H100, H200), added up over the layers. Shapes between those of the tables are
# interpolated. Where the sum falls with more tokens, by up to 11%, the larger one is kept.
_TABLES = (
    PublishedTable(
        "Llama-7B",
        "a100-80gb",
        {
            1: 9.275,
            16: 9.455,
            32: 9.591,
            64: 9.752,
            96: 11.12,
            128: 11.13,
            160: 15.63,
            192: 16.52,
            256: 16.62,
            384: 22.13,
            512: 28.75,
            768: 39.43,
            1024: 54.06,
            2048: 102.6,
            4096: 204.8,
            8192: 408.5,
        },
    ),
    PublishedTable(
        "Llama-7B",
        "h100",
        {
            1: 4.748,
            16: 5.448,
            32: 5.448,
            64: 5.448,
            96: 5.448,
            128: 5.448,
            160: 5.648,
            192: 5.925,
            256: 6.301,
            512: 8.659,
            768: 12.34,
            1024: 16.64,
            2048: 33.83,
            4096: 68.47,
            8192: 145.3,
        },
    ),
    PublishedTable(
        "Llama-7B",
        "h200",
        {
            1: 3.722,
            16: 3.994,
            32: 4.032,
            64: 4.033,
            96: 4.135,
            128: 4.135,
            160: 4.576,
            192: 5.286,
            256: 5.286,
            512: 8.545,
            768: 12.73,
            1024: 16.86,
            2048: 34.66,
            4096: 71.62,
            8192: 149.3,
        },
    ),
    PublishedTable(
        "Llama-13B",
        "a100-80gb",
        {
            1: 18.28,
            16: 18.28,
            32: 18.33,
            64: 19.02,
            96: 20.79,
            128: 21.28,
            160: 32.26,
            192: 32.28,
            256: 32.83,
            384: 41.52,
            512: 53.82,
            768: 80.95,
            1024: 97.13,
            2048: 187.0,
            4096: 373.8,
            8192: 736.3,
        },
    ),
    PublishedTable(
        "Llama-13B",
        "h100",
        {
            1: 8.954,
            16: 10.26,
            32: 10.38,
            64: 10.7,
            96: 10.7,
            128: 10.78,
            160: 10.78,
            192: 10.78,
            256: 11.72,
            512: 16.67,
            768: 24.01,
            1024: 32.43,
            2048: 64.57,
            4096: 139.5,
            8192: 290.7,
        },
    ),
    PublishedTable(
        "Llama-13B",
        "h200",
        {
            1: 6.766,
            16: 7.433,
            32: 7.495,
            64: 7.623,
            96: 7.623,
            128: 7.905,
            160: 8.337,
            192: 8.968,
            256: 9.858,
            512: 16.62,
            768: 23.65,
            1024: 32.58,
            2048: 65.08,
            4096: 141.5,
            8192: 301.0,
        },
    ),
    PublishedTable(
        "Llama-3-8B",
        "a100-80gb",
        {
            1: 10.39,
            16: 10.39,
            32: 10.52,
            64: 10.52,
            96: 12.01,
            128: 12.36,
            160: 16.84,
            192: 17.76,
            256: 17.88,
            384: 23.73,
            512: 31.57,
            768: 45.73,
            1024: 59.39,
            2048: 113.6,
            4096: 226.7,
            8192: 458.9,
        },
    ),
    PublishedTable(
        "Llama-3-8B",
        "h100",
        {
            1: 5.569,
            16: 6.122,
            32: 6.175,
            64: 6.322,
            96: 6.322,
            128: 6.322,
            160: 6.322,
            192: 6.56,
            256: 6.984,
            512: 9.857,
            768: 14.05,
            1024: 19.13,
            2048: 38.24,
            4096: 76.01,
            8192: 165.0,
        },
    ),
    PublishedTable(
        "Llama-3-8B",
        "h200",
        {
            1: 4.118,
            16: 4.473,
            32: 4.535,
            64: 4.678,
            96: 4.678,
            128: 4.708,
            160: 5.073,
            192: 5.617,
            256: 5.855,
            512: 9.746,
            768: 14.6,
            1024: 19.5,
            2048: 42.24,
            4096: 83.89,
            8192: 167.6,
        },
    ),
)
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
    matrix_s = roofline(model, gpu, tensor_parallel) if table is None else table.matrix_s
    attention = _ATTENTION.get(gpu.name, _A100_ATTENTION)
    kv_shards = model.kv_shards(tensor_parallel)
    kv_bytes = model.kv_bytes_per_token / kv_shards
    copied_s = 1 / (gpu.bandwidth * COPY_BANDWIDTH_SHARE)
    launch_s = LAUNCH_LAYER_S * model.layers
    if tensor_parallel > 1:
        launch_s += 2 * model.layers * ALL_REDUCE_S
    attention_row_s = attention.row_head_s * model.layers * model.kv_heads / kv_shards
    name = f"{model.name} on {gpu.name}"
    return StepCosts(
        name=name if tensor_parallel == 1 else f"{name} x {tensor_parallel}",
        kind="predicted",
        source=_source(model, gpu, tensor_parallel, table),
        matrix_s=matrix_s,
        attended_token_s=kv_bytes / (gpu.bandwidth * attention.bandwidth_share),
        row_s=attention_row_s + LOGIT_BYTES * model.vocab_size / tensor_parallel * copied_s,
        launch_s=launch_s,
        copied_block_s=2 * block_size * kv_bytes * copied_s,
        host_base_s=HOST_BASE_S,
        host_row_s=HOST_ROW_S,
        largest_graph=LARGEST_GRAPH,
        eager_launch_s=launch_s + KERNELS_PER_LAYER * model.layers * KERNEL_LAUNCH_S,
    )


def published_table(model: ModelSize, gpu: Gpu) -> PublishedTable | None:
    """Return the published table for a model's dimensions in 16 bits on a GPU, if there is one."""
    config = model.config
    dimensions = (
        model.layers, model.hidden_size, config["intermediate_size"], model.kv_heads
    )  # fmt: skip
    name = _TABLE_MODELS.get(dimensions)
    if name is None or model.num_experts > 1 or DTYPE_BYTES[model.dtype] != 2:
        return None
    known = GPUS.get(gpu.name)
    if known is None or (gpu.bandwidth, gpu.flops) != (known.bandwidth, known.flops):
        return None
    return next((each for each in _TABLES if (each.model, each.gpu) == (name, gpu.name)), None)


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


def _source(model: ModelSize, gpu: Gpu, tensor_parallel: int, table: PublishedTable | None) -> str:
    parts = ["predicted, not measured"]
    if table is not None:
        parts.append(
            f"matrix products of {table.model} on {gpu.name} from NVIDIA AIConfigurator's tables "
            "per operator, added up"
        )
        if gpu.name == "h100":
            parts.append(_H100_CAVEAT)
    else:
        parts.append(
            f"matrix products from a roofline of {gpu.name}: the larger of the weights at "
            f"{WEIGHTS_BANDWIDTH_SHARE:.0%} of {gpu.bandwidth / 1e9:,.0f} GB/s and the arithmetic "
            f"at {FLOPS_SHARE:.0%} of {gpu.flops / 1e12:,.0f} TFLOP/s; {_ROOFLINE_CAVEAT}"
        )
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
