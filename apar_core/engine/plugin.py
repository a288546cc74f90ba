"""Installs forking into vLLM: entry point of the group `vllm.general_plugins`.

vLLM loads it in every process. Engines whose `scheduler_cls` is not ours stay as they are.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

_COMPLETES = "_apar_completes"
"""Mark of our own `create_engine_config`, so that it is not wrapped twice."""


def register() -> None:
    """Let vLLM's engines build our processors; may be called more than once.

    vLLM has no setting for the classes of its input and output processor, so their names are
    replaced where the two engines look them up. Both act as vLLM's own unless an engine forks.
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
    if not hasattr(create, _COMPLETES):
        setattr(EngineArgs, create.__name__, _completing(create))


def _completing(create: Any) -> Any:
    from apar_core.engine import engine_config

    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return engine_config.complete(create(self, *args, **kwargs))

    setattr(create_engine_config, _COMPLETES, True)
    return create_engine_config
