"""Install forks into vLLM: entry point of the group `vllm.general_plugins`.

vLLM loads it in every process. Engines without our `scheduler_cls` are not changed.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FORK_BANS = "apar_core.engine.logits_processors:ForkBans"
_COMPLETES = "_apar_completes"
"""Mark of our own `create_engine_config`, so that it is not wrapped twice."""


def register() -> None:
    """Let vLLM's engines build our processors; may be called more than once.

    vLLM has no setting for the classes of its input and output processor, so their names are
    replaced where its two engines look them up. Both act like vLLM's own unless an engine forks.
    """
    # Imported here: vLLM calls this while its own modules load.
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import async_llm, llm_engine

    from apar_core.engine.core_state import install_core_state
    from apar_core.engine.input_processor import ForkInputProcessor
    from apar_core.engine.output_processor import ForkOutputProcessor

    for module in (async_llm, llm_engine):
        vars(module)["InputProcessor"] = ForkInputProcessor
        vars(module)["OutputProcessor"] = ForkOutputProcessor
    install_core_state()
    create = EngineArgs.create_engine_config
    if hasattr(create, _COMPLETES):
        return

    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return complete(create(self, *args, **kwargs))

    setattr(create_engine_config, _COMPLETES, True)
    setattr(EngineArgs, create.__name__, create_engine_config)


def complete(vllm_config: VllmConfig) -> VllmConfig:
    """Set the scheduler variant and the logits processor of an engine that forks."""
    from apar_core.engine.input_processor import bans_by_logits_processor, forks
    from apar_core.scheduler.fork_scheduler import ForkAsyncScheduler, ForkScheduler

    if not forks(vllm_config):
        return vllm_config
    scheduler_config = vllm_config.scheduler_config
    model_config = vllm_config.model_config
    if model_config.runner_type == "pooling":
        # Such a model generates nothing. An encoder may also have no prefix cache.
        scheduler_config.scheduler_cls = None
        vllm_config.cache_config.enable_prefix_caching &= model_config.is_prefix_caching_supported
        return vllm_config
    if scheduler_config.get_scheduler_cls() in (ForkScheduler, ForkAsyncScheduler):
        scheduler_config.scheduler_cls = (
            ForkAsyncScheduler if scheduler_config.async_scheduling else ForkScheduler
        )
    processors = list(vllm_config.model_config.logits_processors or [])
    if bans_by_logits_processor(vllm_config) and FORK_BANS not in processors:
        vllm_config.model_config.logits_processors = [*processors, FORK_BANS]
    return vllm_config
