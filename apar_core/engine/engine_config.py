"""Completes a vLLM configuration whose `scheduler_cls` is one of ours."""

from __future__ import annotations

from vllm.config import VllmConfig

from apar_core.engine.replay_request import REPLAY
from apar_core.scheduler.fork_scheduler import ForkAsyncScheduler, ForkMixin, ForkScheduler

FORK_BANS = "apar_core.engine.fork_bans:ForkBans"


def forks(vllm_config: VllmConfig) -> bool:
    """Whether an engine with this configuration forks."""
    if vllm_config.scheduler_config.scheduler_cls is None:
        return False
    scheduler_cls = vllm_config.scheduler_config.get_scheduler_cls()
    return isinstance(scheduler_cls, type) and issubclass(scheduler_cls, ForkMixin)


def bans_by_logits_processor(vllm_config: VllmConfig) -> bool:
    """Whether control tokens are banned by our logits processor rather than as bad words.

    vLLM refuses custom logits processors beside speculative decoding, and its V2 model runner does
    not run processors of the V1 interface. Bad words work everywhere, but cost time per row.
    """
    return vllm_config.speculative_config is None and not vllm_config.use_v2_model_runner


def replays(vllm_config: VllmConfig) -> bool:
    """Whether the engine can be made to generate given tokens."""
    return REPLAY in (vllm_config.model_config.logits_processors or ())


def complete(vllm_config: VllmConfig) -> VllmConfig:
    """Choose the scheduler variant and add the logits processor; leaves other engines alone."""
    if not forks(vllm_config):
        return vllm_config
    scheduler_config = vllm_config.scheduler_config
    if scheduler_config.get_scheduler_cls() in (ForkScheduler, ForkAsyncScheduler):
        scheduler_config.scheduler_cls = (
            ForkAsyncScheduler if scheduler_config.async_scheduling else ForkScheduler
        )
    processors = list(vllm_config.model_config.logits_processors or [])
    if bans_by_logits_processor(vllm_config) and FORK_BANS not in processors:
        vllm_config.model_config.logits_processors = [*processors, FORK_BANS]
    return vllm_config
