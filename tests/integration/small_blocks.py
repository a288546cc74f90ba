"""vLLM's CPU attention with blocks of 16 tokens, the usual size on GPUs.

The kernel has a path for them ("vec16") that the backend does not offer.
"""

from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


class SmallBlockAttention(CPUAttentionBackend):
    """The CPU backend, offered for every multiple of 16."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


def offer_small_blocks() -> None:
    """Let the engines of this process use blocks of 16 tokens."""
    register_backend(
        AttentionBackendEnum.CPU_ATTN, f"{SmallBlockAttention.__module__}.SmallBlockAttention"
    )
