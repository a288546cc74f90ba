"""GPUs known by name: memory, bandwidth, arithmetic."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from apar_core.errors import StepCostsError
from apar_core.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: memory in bytes, bandwidth in bytes per second, dense 16-bit FLOP per second.

    They are the data sheet's, with a GB of 10^9 bytes. Of A10G, L4 and L40S, where CUDA reports
    less memory than that, it is CUDA's. On the others CUDA reports about 6% more.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float

    @property
    def memory_gib(self) -> float:
        """Memory in GiB."""
        return self.memory_bytes / 2**30


_TABLE = (
    Gpu("a10g", 23.6e9, 600e9, 125e12),
    Gpu("l4", 23.6e9, 300e9, 121e12),
    Gpu("rtx-4090", 24e9, 1008e9, 165e12),
    Gpu("a100-40gb", 40e9, 1555e9, 312e12),
    Gpu("l40s", 47.6e9, 864e9, 362e12),
    Gpu("a100-80gb", 80e9, 2039e9, 312e12),
    Gpu("a100-80gb-pcie", 80e9, 1935e9, 312e12),
    Gpu("h100-pcie", 80e9, 2000e9, 756e12),
    Gpu("h100", 80e9, 3350e9, 989e12),
    Gpu("h200", 141e9, 4800e9, 989e12),
)
GPUS = {gpu.name: gpu for gpu in _TABLE}

# Names in short form (see `_short`), among them those that CUDA reports.
_ALIASES = {
    "a100": "a100-80gb",
    "a100-40g": "a100-40gb",
    "a100-80g": "a100-80gb",
    "a100-sxm4-40gb": "a100-40gb",
    "a100-pcie-40gb": "a100-40gb",
    "a100-sxm4-80gb": "a100-80gb",
    "a100-sxm-80gb": "a100-80gb",
    "a100-pcie-80gb": "a100-80gb-pcie",
    "h100-80g": "h100",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "h100-80gb-hbm3": "h100",
    "h100-sxm5-80gb": "h100",
    # Of one GPU only the FP64 arithmetic differs, and between GPUs NVLink is slower.
    "h800": "h100",
    "h200-141gb": "h200",
    "h200-sxm": "h200",
    "4090": "rtx-4090",
}


def find_gpu(
    name: str,
    memory_gib: float | None = None,
    bandwidth_gb_s: float | None = None,
    tflops: float | None = None,
) -> Gpu:
    """Return a known GPU with the given figures in place of its own.

    `name` may be NVIDIA's, as "NVIDIA A100-SXM4-80GB". A GPU that is not known needs all three
    figures; without them StepCostsError is raised.
    """
    short = _short(name)
    known = GPUS.get(_ALIASES.get(short, short))
    if known is None:
        if memory_gib is None or bandwidth_gb_s is None or tflops is None:
            raise StepCostsError(
                f"unknown GPU {name!r}: known are {', '.join(GPUS)}; another one needs its memory, "
                f"bandwidth and TFLOP/s{did_you_mean(short, GPUS)}"
            )
        known = Gpu(name, 0.0, 0.0, 0.0)
    for figure, value in (
        ("memory", memory_gib), ("bandwidth", bandwidth_gb_s), ("TFLOP/s", tflops)
    ):  # fmt: skip
        if value is not None and not value > 0:
            raise StepCostsError(f"{figure} of the GPU {name!r} must be above 0, not {value:g}")
    return replace(
        known,
        memory_bytes=known.memory_bytes if memory_gib is None else memory_gib * 2**30,
        bandwidth=known.bandwidth if bandwidth_gb_s is None else bandwidth_gb_s * 1e9,
        flops=known.flops if tflops is None else tflops * 1e12,
    )


def _short(name: str) -> str:
    """Return a name in lower case with hyphens, without NVIDIA's words."""
    words = re.split(r"[\s_-]+", name.strip().lower())
    return "-".join(word for word in words if word not in ("nvidia", "geforce", "tesla"))
