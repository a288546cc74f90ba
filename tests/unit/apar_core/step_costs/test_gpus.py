"""GPUs are found by several names, and their figures can be replaced."""

from __future__ import annotations

import pytest

from apar_core.errors import StepCostsError
from apar_core.step_costs.gpus import GPUS, find_gpu


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a100-80gb", "a100-80gb"),
        ("a100-80g", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H800", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        *((name, name) for name in GPUS),
    ],
)
def test_a_gpu_is_found_by_its_name_and_by_nvidias(name: str, found: str) -> None:
    assert find_gpu(name) == GPUS[found]


def test_figures_replace_those_of_a_known_gpu() -> None:
    gpu = find_gpu("h200", memory_gib=100.0, tflops=500)

    assert gpu.memory_bytes == 100 * 2**30
    assert gpu.memory_gib == 100.0
    assert (gpu.bandwidth, gpu.flops) == (4800e9, 500e12)


def test_another_gpu_needs_all_figures() -> None:
    assert find_gpu("own", 48.0, 900.0, 200.0).bandwidth == 900e9
    with pytest.raises(StepCostsError, match=r"unknown GPU 'own': known are .*a100-80gb"):
        find_gpu("own", 48.0)


def test_a_figure_must_be_positive() -> None:
    with pytest.raises(StepCostsError, match=r"bandwidth of the GPU 'l4' must be above 0, not -1"):
        find_gpu("l4", bandwidth_gb_s=-1.0)
