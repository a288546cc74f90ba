"""What fits into the GPUs of one replica."""

from __future__ import annotations

import math
from dataclasses import dataclass

from apar_core.step_costs.models import ModelSize
from cluster.sizing.errors import SizingError
from cluster.sizing.request_shape import RequestShape
from cluster.sizing.step_costs import kv_shards

GIB = 2**30
OVERHEAD_GIB = 2.8
"""Activations, logits, CUDA graphs and context on each GPU: an assumption, as the simulation's."""
Z = 2.33
"""One moment in a hundred lies beyond so many standard deviations."""


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """The memory of each GPU of a replica in bytes, and the KV cache of all of them together."""

    usable_bytes: float
    weight_bytes: float
    overhead_bytes: float
    kv_bytes: float
    kv_bytes_per_token: float
    block_size: int

    @property
    def blocks(self) -> int:
        """KV blocks of the replica."""
        return int(self.kv_bytes // (self.kv_bytes_per_token * self.block_size))

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.blocks * self.block_size


def gpu_memory(
    model: ModelSize,
    memory_gib: float,
    utilisation: float,
    tensor_parallel: int,
    block_size: int,
    overhead_gib: float = OVERHEAD_GIB,
) -> ReplicaMemory:
    """What a GPU's memory leaves for the KV cache. Raises SizingError where nothing is left."""
    usable = memory_gib * GIB * utilisation
    weights = model.weight_bytes / tensor_parallel
    left = usable - weights - overhead_gib * GIB
    if left <= 0:
        raise SizingError(
            f"{model.name} does not fit: {weights / GIB:.1f} GiB of weights and {overhead_gib:g} "
            f"GiB beside them on each of {tensor_parallel} GPUs, of which {usable / GIB:.1f} GiB "
            "may be used; take larger GPUs or more --tensor-parallel"
        )
    per_token = model.kv_bytes_per_token / kv_shards(model, tensor_parallel)
    return ReplicaMemory(usable, weights, overhead_gib * GIB, left, per_token, block_size)


def cpu_memory(model: ModelSize, kv_cache_gib: float, block_size: int) -> ReplicaMemory:
    """A replica on a CPU, whose KV cache is as large as the configuration says."""
    kv_bytes = kv_cache_gib * GIB
    weights = float(model.weight_bytes)
    return ReplicaMemory(
        weights + kv_bytes, weights, 0.0, kv_bytes, model.kv_bytes_per_token, block_size
    )


def held_by_request(shape: RequestShape, block_size: int) -> float:
    """Tokens of KV cache that a request takes at a random moment, half-full blocks included."""
    return shape.held_tokens + shape.alive_threads * block_size / 2


def requests_that_fit(memory: ReplicaMemory, shape: RequestShape) -> int:
    """Most requests at once whose KV cache fits, but for one moment in a hundred.

    What each holds at a moment is taken as independent of the others; so n of them hold n means,
    give or take the root of n deviations.
    """
    mean = held_by_request(shape, memory.block_size)
    return _most(mean, shape.held_tokens_sd, memory.tokens)


def threads_of(requests: int, shape: RequestShape) -> int:
    """Threads alive in so many requests, but for one moment in a hundred."""
    spread = Z * math.sqrt(requests) * shape.alive_threads_sd
    return max(requests, math.ceil(requests * shape.alive_threads + spread - 1e-9))


def requests_of_threads(most_threads: int, shape: RequestShape) -> int:
    """Most requests at once whose threads stay within a number, likewise."""
    return _most(shape.alive_threads, shape.alive_threads_sd, most_threads)


def _most(mean: float, deviation: float, limit: float) -> int:
    """The largest n with n means and Z roots of n deviations within the limit."""
    spread = Z * deviation
    root = (math.sqrt(spread * spread + 4 * mean * limit) - spread) / (2 * mean)
    return int(root * root + 1e-9)
