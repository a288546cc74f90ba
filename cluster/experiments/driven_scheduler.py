"""vLLM's scheduler without a model: whatever it schedules is answered at once, and timed.

The scheduler, its KV cache manager and its prefix cache are the real ones; only the tokens come
from a rule instead of a forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from apar_core.scheduler.fork_settings import CONFIG_KEY

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step: the rows that got a token, and the scheduler's own seconds before and after it.

    They are CPU seconds of this thread: other work on the machine is left out.
    """

    rows: int
    schedule_s: float
    update_s: float

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.schedule_s + self.update_s


class DrivenScheduler:
    """A scheduler and the steps that it has made.

    `next_token` says what a request generates next; its `num_output_tokens` have been taken up.
    """

    def __init__(self, scheduler: Scheduler, next_token: Callable[[Request], int]) -> None:
        self.scheduler = scheduler
        self.costs: list[StepCost] = []
        self._next_token = next_token

    @property
    def has_ended(self) -> bool:
        """Whether no request is left."""
        return not self.scheduler.has_requests()

    def step(self) -> None:
        """Schedule a step, answer it and take the answer in."""
        scheduler = self.scheduler
        began_s = time.thread_time()
        step = scheduler.schedule()
        schedule_s = time.thread_time() - began_s
        names = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._sampled(scheduler.requests[name]) for name in names],
        )
        began_s = time.thread_time()
        scheduler.update_from_output(step, output)
        update_s = time.thread_time() - began_s
        self.costs.append(StepCost(len(names), schedule_s, update_s))

    def _sampled(self, request: Request) -> list[int]:
        return [] if request.is_prefill_chunk else [self._next_token(request)]


def block_hasher() -> Any:
    """What hashes the blocks of requests for the prefix cache, as the engine core does."""
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK_SIZE, sha256)


def build_scheduler(
    scheduler_cls: type[Scheduler],
    checkpoint: str,
    *,
    max_num_seqs: int,
    num_blocks: int,
    forks: dict[str, Any],
) -> Scheduler:
    """A scheduler for a checkpoint on this machine, `forks` being our settings (others ignore it).

    It batches up to four tokens a sequence in a step.
    """
    vllm_config = EngineArgs(
        model=checkpoint,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=4 * max_num_seqs,
        max_model_len=2048,
        enable_prefix_caching=True,
        additional_config={CONFIG_KEY: forks},
    ).create_engine_config()
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    return scheduler_cls(
        vllm_config,
        kv_cache_config=_kv_cache(vllm_config, num_blocks),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


def _kv_cache(vllm_config: VllmConfig, num_blocks: int) -> KVCacheConfig:
    model = vllm_config.model_config
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
        head_size=model.get_head_size(),
        dtype=torch.bfloat16,
    )
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
