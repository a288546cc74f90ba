"""The check of vLLM's kernels compares them with what torch computes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import vllm_checks
from benchmarks.gpu.vllm_checks import kernel_checks
from tests.fakes.flash_attention import flash_attn_varlen_func

FLASH = [name for name in kernel_checks("cpu") if name.startswith("FlashAttention")]


def error_of(name: str) -> float:
    found, expected = kernel_checks("cpu")[name]()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", FLASH)
def test_a_right_flash_attention_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(vllm_checks, "flash_attention", lambda: flash_attn_varlen_func)

    assert error_of(name) < 5e-3


def test_a_wrong_flash_attention_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_a_token(*, seqused_k: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        return flash_attn_varlen_func(seqused_k=seqused_k - 1, **arguments)

    torch.manual_seed(0)
    monkeypatch.setattr(vllm_checks, "flash_attention", lambda: forgets_a_token)

    assert error_of(FLASH[0]) > 1e-2


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
def test_kernels_that_a_cpu_has_pass(name: str) -> None:
    torch.manual_seed(0)

    assert error_of(name) < 5e-3
