"""Install forks into vLLM: entry point of the group `vllm.general_plugins`.

vLLM loads the plugin in every process of an environment that has this package, without catching
exceptions. So it only waits for an engine configuration that names our scheduler. It stays out of a
vLLM version that has not been checked.
"""

from __future__ import annotations

import logging
from functools import cache, wraps
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any

from apar_core.engine.start_stages import watch_stages
from apar_core.errors import EngineError
from apar_core.vllm_log import log_as_vllm
from apar_core.vllm_names import SUPPORTED, is_supported, patch_processors, vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

FORK_BANS = "apar_core.engine.logits_processors:ForkBans"
FORK_BANS_V2 = "apar_core.engine.logits_processors_v2:ForkBans"
_OUR_SCHEDULERS = "apar_core.scheduler.fork_scheduler"
_COMPLETES = "_apar_completes"
"""Mark of our own `create_engine_config`, so that it is not wrapped twice."""


@cache
def register() -> None:
    """Prepare for an engine that forks; may be called more than once, and never raises."""
    watch_stages()
    version = vllm_version()
    # vLLM loads plugins in its workers, too, which would repeat the warning.
    is_main = parent_process() is None
    if not is_supported(version):
        if is_main:
            logger.warning(
                "apar-serve stays out of vLLM %s: it was checked with vLLM %s",
                version,
                " and ".join(SUPPORTED),
            )
        return
    try:
        _wrap_configuration()
    except Exception:  # would end a vLLM that does not use forks
        logger.warning("apar-serve stays out of vLLM %s", version, exc_info=is_main)


def _wrap_configuration() -> None:
    """Let each new engine configuration pass through `complete`."""
    # Imported here: vLLM calls this while its own modules load.
    from apar_core.engine.fork_adapter import prepare_fork_adapter
    from apar_core.vllm_names import EngineArgs

    create = EngineArgs.create_engine_config
    if hasattr(create, _COMPLETES):
        return

    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepare_fork_adapter(self)
        vllm_config = create(self, *args, **kwargs)
        return complete(vllm_config) if _has_our_scheduler(vllm_config) else vllm_config

    setattr(create_engine_config, _COMPLETES, True)
    setattr(EngineArgs, create.__name__, create_engine_config)


def _has_our_scheduler(vllm_config: VllmConfig) -> bool:
    """Return whether an engine's scheduler derives from ours; imports nothing of ours.

    Raises EngineError for a name in our package that does not exist. Other names that do not exist
    are left to vLLM.
    """
    name = vllm_config.scheduler_config.scheduler_cls
    if name is None:
        return False
    try:
        scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    except (ImportError, AttributeError, ValueError) as error:
        if str(name).partition(".")[0] != _OUR_SCHEDULERS.partition(".")[0]:
            return False
        raise EngineError(
            f"scheduler_cls: {name!r} does not exist: use {_OUR_SCHEDULERS}.ForkScheduler"
        ) from error
    bases = getattr(scheduler, "__mro__", ())
    return any(base.__module__ == _OUR_SCHEDULERS for base in bases)


def install_processors() -> None:
    """Let vLLM's engines in this process build our processors; may be called more than once.

    Both act like vLLM's own in an engine that does not fork.
    """
    from apar_core.engine.input_processor import ForkInputProcessor
    from apar_core.engine.output_processor import ForkOutputProcessor

    patch_processors(ForkInputProcessor, ForkOutputProcessor)


def complete(vllm_config: VllmConfig) -> VllmConfig:
    """Set up an engine that forks: processors, logits processors and scheduler variant."""
    from apar_core.attention.selection import CPU_WORKER, use_family_attention
    from apar_core.engine.gpu_start import choose_sampler
    from apar_core.engine.input_processor import bans_by_logits_processor, forks
    from apar_core.engine.prompt_chain import load_prompt_rows, uses_prompt_chain
    from apar_core.engine.replay import REPLAY, REPLAY_V2
    from apar_core.scheduler.fork_scheduler import ForkAsyncScheduler, ForkScheduler
    from apar_core.scheduler.fork_settings import check_engine, fork_settings, generates

    _warn_of_deprecated_runner(vllm_config)
    if uses_prompt_chain(vllm_config):
        # For its errors, which otherwise end a worker.
        load_prompt_rows(vllm_config)
    if not forks(vllm_config):
        return vllm_config
    log_as_vllm()
    install_processors()
    choose_sampler()
    processors = list(vllm_config.model_config.logits_processors or [])
    if generates(vllm_config) and bans_by_logits_processor(vllm_config):
        processors.append(FORK_BANS)
    if vllm_config.use_v2_model_runner:
        v2 = {FORK_BANS: FORK_BANS_V2, REPLAY: REPLAY_V2}
        processors = [v2.get(each, each) if isinstance(each, str) else each for each in processors]
    if processors:
        # Once each: a virtual engine completes its configuration again.
        vllm_config.model_config.logits_processors = list(dict.fromkeys(processors))
    scheduler_config = vllm_config.scheduler_config
    if not generates(vllm_config):
        # Encoders cannot have the prefix cache that forks need.
        supported = vllm_config.model_config.is_prefix_caching_supported
        vllm_config.cache_config.enable_prefix_caching &= supported
    # A class instead of its name shows `check_engine` that this has run.
    scheduler = scheduler_config.get_scheduler_cls()
    if scheduler in (ForkScheduler, ForkAsyncScheduler):
        scheduler = ForkAsyncScheduler if scheduler_config.async_scheduling else ForkScheduler
    scheduler_config.scheduler_cls = scheduler
    parallel = vllm_config.parallel_config
    if parallel.worker_cls == CPU_WORKER:
        _compile_with_adapters(vllm_config)
    if fork_settings(vllm_config).attention == "family":
        use_family_attention(vllm_config)
    if parallel.worker_cls == CPU_WORKER:
        parallel.worker_cls = "apar_core.cpu_worker.ForkCPUWorker"
    # For its errors, which otherwise end the engine's process.
    check_engine(vllm_config)
    return vllm_config


def _warn_of_deprecated_runner(vllm_config: VllmConfig) -> None:
    """Warn of a method of speculation that vLLM runs in its V1 model runner only."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method in ("medusa", "custom_class"):
        logger.warning(
            "speculative_config: method %s needs vLLM's V1 model runner, which vLLM has "
            "deprecated, and runs without async scheduling",
            speculative.method,
        )


def _compile_with_adapters(vllm_config: VllmConfig) -> None:
    """Compile a model with adapters on CPUs as one without.

    vLLM prepares the compiler, and then does not compile: what a layer with adapters computes
    differs between steps. Our worker hides that from the compiler.
    """
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    is_prepared = "cpp.dynamic_threads" in compilation.inductor_compile_config
    if vllm_config.lora_config is not None and is_prepared:
        compilation.mode = CompilationMode.DYNAMO_TRACE_ONCE
