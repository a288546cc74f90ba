"""Selection of family attention: engine and layer checks, and the worker class to use.

A worker subclass replaces vLLM's attention backends while the model is built, so vLLM still chooses
among them by its own rules. Without `attention: family`, nothing in vLLM is replaced.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from apar_core.attention.settings import FamilySettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
WORKERS = {
    CPU_WORKER: "apar_core.attention.cpu_backend.FamilyCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "apar_core.attention.gpu_backends.FamilyGPUWorker",
}
"""Our worker classes, by the vLLM class that each replaces."""
_CPU = ".CPUWorker"
_PLAIN_KV_CACHES = ("auto", "float16", "bfloat16", "float32")
_FALLBACK = "attention: family: KV blocks are read row by row, because of %s"


def use_family_attention(vllm_config: VllmConfig) -> None:
    """Make an engine's workers read families, or log why they cannot."""
    parallel = vllm_config.parallel_config
    if reads_families(vllm_config):
        return
    if (problem := engine_problem(vllm_config)) is not None:
        logger.warning(_FALLBACK, problem)
        return
    if vllm_config.speculative_config is not None:
        logger.warning("attention: family: rows with drafts are read row by row")
    parallel.worker_cls = WORKERS[parallel.worker_cls]


def reads_families(vllm_config: VllmConfig) -> bool:
    """Return whether an engine uses one of our workers; known before its model is built."""
    return vllm_config.parallel_config.worker_cls in WORKERS.values()


def engine_problem(vllm_config: VllmConfig) -> str | None:
    """Return why an engine cannot read families; None if it can.

    Checks only what is known before the model is built.
    """
    parallel, model, cache = (
        vllm_config.parallel_config,
        vllm_config.model_config,
        vllm_config.cache_config,
    )
    speculates = vllm_config.speculative_config is not None
    problems = {
        f"the runner {model.runner_type!r}, which generates no text": model.runner_type
        != "generate",
        "multi-head latent attention": model.use_mla,
        f"a KV cache of type {cache.cache_dtype}": cache.cache_dtype
        not in ("auto", str(model.dtype).removeprefix("torch.")),
        # The prompt, and a window after it.
        "reference sliding window attention": model.rswa_window is not None,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "microbatches": parallel.use_ubatching,
        "kv_sharing_fast_prefill": cache.kv_sharing_fast_prefill,
        # The host then knows only a bound on a row's length, also between the drafts of a step.
        "speculative decoding on a GPU": speculates and not parallel.worker_cls.endswith(_CPU),
        "speculative decoding with asynchronous scheduling": speculates
        and bool(vllm_config.scheduler_config.async_scheduling),
        "VLLM_BATCH_INVARIANT": os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"),
        f"the worker {parallel.worker_cls}": parallel.worker_cls not in WORKERS,
    }
    return next((name for name, applies in problems.items() if applies), None)


def layer_problem(impl: Any) -> str | None:
    """Return why a layer's attention cannot be computed in two passes; None if it can.

    `impl` is vLLM's implementation of the layer's attention, for CPU, FlashAttention or Triton.
    """
    window = impl.sliding_window
    problems = {
        f"attention of type {impl.attn_type}": impl.attn_type != "decoder",
        "a sliding window": window is not None and window not in (-1, (-1, -1)),
        "ALiBi": impl.alibi_slopes is not None,
        "a soft cap of logits": bool(impl.logits_soft_cap),
        "attention sinks": impl.sinks is not None,
        f"a KV cache of type {impl.kv_cache_dtype}": impl.kv_cache_dtype not in _PLAIN_KV_CACHES,
        "a limited look-back": getattr(impl, "chunk_lookback", -1) != -1,
    }
    return next((name for name, applies in problems.items() if applies), None)


def family_settings(vllm_config: VllmConfig, block_layer_bytes: int) -> FamilySettings:
    """Return the thresholds from an engine's `additional_config`, which the plugin has validated.

    Unless `min_saved_blocks` is given, a GPU uses the threshold for KV blocks of
    `block_layer_bytes` bytes per layer. A CPU, used for tests, reads every family.
    """
    additional = vllm_config.additional_config
    values = additional.get("apar", {}) if isinstance(additional, dict) else {}
    settings = FamilySettings(**(limits := values.get("family", {})))
    if "min_saved_blocks" in limits or vllm_config.device_config.device_type == "cpu":
        return settings
    derived = FamilySettings.for_blocks(block_layer_bytes)
    return replace(settings, min_saved_blocks=derived.min_saved_blocks)


@lru_cache
def log_fallback(problem: str) -> None:
    """Log why some or all layers are read row by row; each reason once per process."""
    logger.warning(_FALLBACK, problem)
