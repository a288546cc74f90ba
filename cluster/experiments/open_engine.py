"""Starts the engines of an experiment: a CPU model with random weights, or any checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from apar_core.errors import EvaluationError
from cluster.config.model import PRESETS
from cluster.experiments.cpu_model import CPU_MODELS, write_cpu_model
from cluster.experiments.experiment_engine import ExperimentEngine
from cluster.experiments.settings import ExperimentSettings

_MAX_ROWS = 1024
_MEMORY_ARGUMENTS = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes"})


@contextmanager
def model_folder(settings: ExperimentSettings) -> Iterator[str]:
    """Path or hub name of the model; a CPU model's folder lasts as long as the context."""
    if not settings.is_cpu_model:
        preset = PRESETS.get(settings.model)
        yield settings.model if preset is None else preset.path
        return
    with TemporaryDirectory(prefix="apar-cpu-model-") as folder:
        yield str(write_cpu_model(CPU_MODELS[settings.model], Path(folder)))


@contextmanager
def open_engine(settings: ExperimentSettings, model_path: str) -> Iterator[ExperimentEngine]:
    """An engine that replays, until the end of the context.

    Raises EvaluationError if the model has no control tokens or its cache is too small for an
    answer of `max_tokens` at the least share.
    """
    # Each engine of a machine would otherwise bind itself to the same cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.engine.replay import REPLAY

    offline = OfflineEngine(model_path, logits_processors=[REPLAY], **_engine_args(settings))
    try:
        control = offline.control_tokens
        if control is None:
            raise EvaluationError(f"{settings.model} has no control tokens: it cannot fork")
        hidden_ids = (control.fork_id, control.child_id, offline.tokenizer.eos_token_id)
        engine = ExperimentEngine(offline, hidden_ids)
        _check_room(engine, settings)
        yield engine
    finally:
        offline.shutdown()


@contextmanager
def open_engines(
    settings: ExperimentSettings, model_path: str, number: int
) -> Iterator[list[ExperimentEngine]]:
    """Several engines of the same kind, each with weights and KV cache of its own.

    None runs on once one of them has ended: vLLM's engines of a process share what that destroys.

    Raises EvaluationError as `open_engine` does, and if all of them would take the same memory.
    """
    if number > 1:
        if not settings.is_cpu_model and _MEMORY_ARGUMENTS.isdisjoint(settings.engine):
            raise EvaluationError(
                f"{number} engines side by side need their parts of the memory, for example "
                f"--engine '{{\"gpu_memory_utilization\": {0.9 / number:.2f}}}'; "
                "or use --one-engine"
            )
        # A step that is scheduled ahead would run in the turn of another engine.
        arguments = {**settings.engine, "async_scheduling": False}
        settings = settings.model_copy(update={"engine": arguments})
    with ExitStack() as stack:
        yield [stack.enter_context(open_engine(settings, model_path)) for _ in range(number)]


def _engine_args(settings: ExperimentSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "block_size": settings.block_size,
        "max_model_len": settings.max_tokens + settings.block_size,
        "max_num_seqs": _MAX_ROWS,
        "max_num_batched_tokens": 2 * _MAX_ROWS,
    }
    if settings.kv_tokens is not None:
        # One block is vLLM's null block.
        num_blocks = settings.kv_tokens // settings.block_size + 1
        arguments["num_gpu_blocks_override"] = num_blocks
    model = CPU_MODELS.get(settings.model)
    if model is not None:
        arguments |= {"load_format": "dummy", "dtype": "float32", "enforce_eager": True}
        if settings.kv_tokens is not None:
            # Or vLLM would want nearly all of the machine's memory, whatever it then takes.
            num_bytes = num_blocks * settings.block_size * model.kv_bytes_per_token
            arguments["kv_cache_memory_bytes"] = num_bytes
    return {**arguments, **settings.engine}


def _check_room(engine: ExperimentEngine, settings: ExperimentSettings) -> None:
    least = min((*settings.kv_shares, *settings.mixed_kv_shares))
    room = round(least * engine.num_blocks) * engine.block_size
    if room < settings.max_tokens:
        raise EvaluationError(
            f"{least:g} of the KV cache holds {room} tokens, an answer with its prompt up to "
            f"{settings.max_tokens}: give more --kv-tokens or a smaller --context-length"
        )
