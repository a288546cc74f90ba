"""GPUs known by name: memory, bandwidth, arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.sizing.errors import SizingError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    `memory_gib` is what CUDA reports, a little less than the data sheet. Bandwidth in bytes a
    second, and dense 16-bit FLOP a second, are the data sheet's.
    """

    name: str
    memory_gib: float
    bandwidth: float
    flops: float


_TABLE = (
    Gpu("a10g", 22.0, 600e9, 125e12),
    Gpu("l4", 22.0, 300e9, 121e12),
    Gpu("rtx-4090", 23.6, 1008e9, 165e12),
    Gpu("a100-40g", 39.4, 1555e9, 312e12),
    Gpu("l40s", 44.4, 864e9, 362e12),
    Gpu("a100-80g", 79.2, 2039e9, 312e12),
    Gpu("h100-80g", 79.2, 3350e9, 989e12),
    Gpu("h200", 139.8, 4800e9, 989e12),
)
GPUS = {gpu.name: gpu for gpu in _TABLE}


def find_gpu(
    name: str,
    memory_gib: float | None = None,
    bandwidth_gb_s: float | None = None,
    tflops: float | None = None,
) -> Gpu:
    """A GPU of the table, with figures given instead of its own; all three for another one.

    Raises SizingError for an unknown name without figures.
    """
    known = GPUS.get(name)
    if known is None and None in (memory_gib, bandwidth_gb_s, tflops):
        raise SizingError(
            f"unknown GPU {name!r}: known are {', '.join(GPUS)}; for another one give "
            "--gpu-memory-gib, --gpu-bandwidth-gb-s and --gpu-tflops"
        )
    base = known or Gpu(name, 0.0, 0.0, 0.0)
    return Gpu(
        name,
        memory_gib or base.memory_gib,
        bandwidth_gb_s * 1e9 if bandwidth_gb_s else base.bandwidth,
        tflops * 1e12 if tflops else base.flops,
    )
