"""How long an engine's steps take: given, measured on a running cluster, or from a roofline."""

from __future__ import annotations

from dataclasses import dataclass

from apar_core.step_costs.gpus import Gpu
from apar_core.step_costs.models import ModelSize

BANDWIDTH_SHARE = 0.8
"""Of a GPU's memory bandwidth, what weights and KV cache are read with."""
FLOPS_SHARE = 0.55
"""Of its arithmetic, what large matrix products reach."""
HIDDEN_SHARE = 0.4
"""Of a decoding row's arithmetic, what hides behind reading the weights."""
LAUNCH_S = 1e-3
"""Launching kernels, sampling and scheduling, a step."""
ALL_REDUCE_S = 15e-6
"""One of the two all-reduces of a layer over several GPUs."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A step's time, linear in what it computes; all in seconds.

    `thread_s` for each thread that gets a token, `attended_token_s` for each token of KV cache that
    it reads, `prefill_token_s` for each prompt token. `source` says where they are from.
    """

    base_s: float
    thread_s: float
    attended_token_s: float
    prefill_token_s: float
    source: str


APAR_TINY_CPU = StepCosts(
    2.518e-3, 95.8e-6, 542.7e-9, 60.22e-6,
    "measured for apar-tiny on one core of a server CPU (docs/results.md, `python -m benchmarks "
    "simulation fit`); another machine needs its own measurement",
)  # fmt: skip


def roofline(model: ModelSize, gpu: Gpu, tensor_parallel: int) -> StepCosts:
    """What the data sheet allows; not measured.

    A step reads the weights once, each thread reads its part of the KV cache, and prompts are bound
    by arithmetic.
    """
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE
    flops = gpu.flops * FLOPS_SHARE
    token_s = 2 * model.parameters / tensor_parallel / flops
    reduce_s = 2 * model.layers * ALL_REDUCE_S if tensor_parallel > 1 else 0.0
    kv_bytes = model.kv_bytes_per_token / kv_shards(model, tensor_parallel)
    return StepCosts(
        base_s=model.weight_bytes / tensor_parallel / bandwidth + LAUNCH_S + reduce_s,
        thread_s=token_s * (1 - HIDDEN_SHARE),
        attended_token_s=kv_bytes / bandwidth,
        prefill_token_s=token_s,
        source=(
            f"roofline of {gpu.name}, not measured: weights and KV cache at "
            f"{BANDWIDTH_SHARE:.0%} of {gpu.bandwidth / 1e9:,.0f} GB/s, arithmetic at "
            f"{FLOPS_SHARE:.0%} of {gpu.flops / 1e12:,.0f} TFLOP/s of which {HIDDEN_SHARE:.0%} "
            f"hides in decoding, {1000 * LAUNCH_S:g} ms a step for launches"
        ),
    )


def kv_shards(model: ModelSize, tensor_parallel: int) -> int:
    """Over how many GPUs a token's KV cache is split; heads are copied where there are fewer."""
    return min(tensor_parallel, model.kv_heads)
