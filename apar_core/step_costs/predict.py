"""Predicted step costs of a model on a GPU: published tables for some, else a roofline.

Nothing here was measured by this project on the GPU that it names. The `source` of the returned
costs says where the numbers come from and how far other sources disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

from apar_core.errors import StepCostsError
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.gpus import GPUS, Gpu
from apar_core.step_costs.models import DTYPE_BYTES, ModelSize

BANDWIDTH_SHARE = 0.8
"""Share of the memory bandwidth at which weights and KV cache are read."""
FLOPS_SHARE = 0.55
"""Share of the arithmetic that large matrix products reach."""
LAUNCH_S = 1e-3
"""A step's time outside matrix products and attention: element-wise kernels and launches."""
KERNELS_PER_LAYER = 10
"""Two normalizations, four matrix products, rotary embedding, KV write, attention, activation."""
KERNEL_LAUNCH_S = 4e-6
"""Launching one kernel outside a CUDA graph: an assumption, and as if nothing hid it."""
LARGEST_GRAPH = 512
"""Tokens of vLLM 0.32's largest CUDA graph with 256 or more `max_num_seqs` (config/vllm.py)."""
ALL_REDUCE_S = 15e-6
"""Latency of one of the two all-reduces of a layer over several GPUs: an assumption."""
LINK_BANDWIDTH = 150e9
"""Bytes per second that an all-reduce moves out of a GPU with NVLink: an assumption."""
LOGIT_BYTES = 10
"""Memory traffic per logit of greedy sampling: read 16 bits, write and read 32 bits."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory for vLLM, its default `gpu_memory_utilization`."""
OVERHEAD_BYTES = 2e9
"""Activations, CUDA graphs, context and the input embedding on each GPU: an assumption."""
BLOCK_SIZE = 16
HOST_BASE_S = 0.0
HOST_ROW_S = 21.5e-6

_H100_CAVEAT = (
    "Vidur's profile of the H100 is 40 to 50% above at 256 tokens and more with its element-wise "
    "kernels, 20 to 30% without them"
)
_ROOFLINE_CAVEAT = (
    "against the published tables of Llama-7B and -13B it errs by -17 to +7% up to 192 tokens, -1 "
    "to +22% at 256, +21 to +34% at 384 and +37 to +46% at 512"
)


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """Milliseconds of all matrix products of a step by tokens, `lm_head` included.

    Source: NVIDIA AIConfigurator's tables per operator, added up over the layers.
    """

    model: str
    gpu: str
    milliseconds: dict[int, float]

    @property
    def matrix_s(self) -> tuple[tuple[int, float], ...]:
        """The table in seconds, as `StepCosts` takes it."""
        return tuple((tokens, each / 1000) for tokens, each in self.milliseconds.items())


_TABLES = (
    PublishedTable(
        "Llama-7B", "a100-80gb",
        {1: 9.3, 64: 9.75, 128: 11.1, 192: 16.6, 256: 16.6, 384: 22.1, 512: 28.8},
    ),
    PublishedTable(
        "Llama-7B", "h100", {1: 4.75, 64: 5.4, 128: 5.4, 192: 5.9, 256: 6.3, 384: 7.7, 512: 8.7}
    ),
    PublishedTable(
        "Llama-7B", "h200", {1: 3.7, 64: 4.0, 128: 4.1, 192: 5.3, 256: 5.3, 384: 7.1, 512: 8.5}
    ),
    PublishedTable(
        "Llama-13B", "a100-80gb", {1: 18.3, 64: 19.0, 128: 21.3, 192: 32.3, 256: 32.8, 512: 53.8}
    ),
    PublishedTable("Llama-13B", "h100", {1: 9.0, 64: 10.7, 128: 10.8, 256: 11.7, 512: 16.7}),
    PublishedTable("Llama-13B", "h200", {1: 6.8, 64: 7.6, 128: 7.9, 256: 9.9, 512: 16.6}),
)  # fmt: skip
# (layers, hidden size, intermediate size, KV heads) of the models that tables were published for.
_TABLE_MODELS = {
    (32, 4096, 11_008, 32): "Llama-7B",
    (40, 5120, 13_824, 40): "Llama-13B",
}


def step_costs(
    model: ModelSize, gpu: Gpu, tensor_parallel: int = 1, block_size: int = BLOCK_SIZE
) -> StepCosts:
    """Return the predicted step costs of a model on a GPU, or on several with NVLink.

    The time of matrix products is a published table's if there is one for the model's dimensions,
    the GPU and one GPU per replica, else that of `roofline`. Raises StepCostsError for a
    `tensor_parallel` below 1.
    """
    _check_tensor_parallel(tensor_parallel)
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE
    table = published_table(model, gpu) if tensor_parallel == 1 else None
    matrix_s = roofline(model, gpu, tensor_parallel) if table is None else table.matrix_s
    kv_bytes = model.kv_bytes_per_token / model.kv_shards(tensor_parallel)
    launch_s = LAUNCH_S
    if tensor_parallel > 1:
        launch_s += 2 * model.layers * ALL_REDUCE_S
    name = f"{model.name} on {gpu.name}"
    return StepCosts(
        name=name if tensor_parallel == 1 else f"{name} x {tensor_parallel}",
        kind="predicted",
        source=_source(model, gpu, tensor_parallel, table),
        matrix_s=matrix_s,
        attended_token_s=kv_bytes / bandwidth,
        row_s=LOGIT_BYTES * model.vocab_size / tensor_parallel / bandwidth,
        launch_s=launch_s,
        copied_block_s=2 * block_size * kv_bytes / bandwidth,
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
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE * tensor_parallel
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
            f"{BANDWIDTH_SHARE:.0%} of {gpu.bandwidth / 1e9:,.0f} GB/s and the arithmetic at "
            f"{FLOPS_SHARE:.0%} of {gpu.flops / 1e12:,.0f} TFLOP/s; {_ROOFLINE_CAVEAT}"
        )
    if model.num_experts > 1:
        parts.append("each expert is taken to be equally likely")
    if tensor_parallel > 1:
        parts.append(
            f"two all-reduces per layer, each {1e6 * ALL_REDUCE_S:g} us and its data at "
            f"{LINK_BANDWIDTH / 1e9:g} GB/s (assumed)"
        )
    parts.append(
        f"KV cache read at {BANDWIDTH_SHARE:.0%} of the bandwidth, {1000 * LAUNCH_S:g} ms a step "
        "beside them (assumed)"
    )
    return "; ".join(parts)


def _check_tensor_parallel(tensor_parallel: int) -> None:
    if tensor_parallel < 1:
        raise StepCostsError(f"tensor_parallel must be 1 or more, not {tensor_parallel}")
