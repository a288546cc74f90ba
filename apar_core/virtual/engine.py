"""Builds engines in virtual time: with vLLM's front end, or the engine core alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.step_costs.costs import StepCosts

VOCABULARY_SIZE = 4096
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
# vLLM's defaults for its OpenAI server on a GPU with 70 GiB or more (vllm 0.32,
# engine/arg_utils.py): tokens per step. Rows are limited far above any experiment.
MAX_STEP_TOKENS = 8192
MAX_ROWS = 4096


@dataclass(frozen=True, slots=True)
class VirtualSpec:
    """A virtual engine: a model's shape, step costs, and KV memory.

    config: the model's Hugging Face configuration; only its dimensions matter.
    kv_tokens: tokens of KV cache, rounded down to blocks.
    """

    config: Mapping[str, Any]
    costs: StepCosts
    kv_tokens: int
    block_size: int = 16
    max_model_len: int = 2048
    max_rows: int = MAX_ROWS
    max_step_tokens: int = MAX_STEP_TOKENS
    is_async: bool = True
    forks: Mapping[str, Any] | None = None

    @property
    def num_blocks(self) -> int:
        """KV blocks of the engine, vLLM's null block included."""
        return self.kv_tokens // self.block_size + 1


def write_model_folder(config: Mapping[str, Any], folder: Path) -> Path:
    """Write a model's configuration with a small vocabulary and tokenizer, without weights."""
    source = checkpoint_path()
    folder.mkdir(parents=True, exist_ok=True)
    base = json.loads((source / "config.json").read_text(encoding="utf-8"))
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim",
    )  # fmt: skip
    base.pop("head_dim", None)
    base.update({name: config[name] for name in names if config.get(name) is not None})
    base.setdefault("num_key_value_heads", base["num_attention_heads"])
    if config.get("num_key_value_heads") is None:
        base["num_key_value_heads"] = base["num_attention_heads"]
    base.update(vocab_size=VOCABULARY_SIZE, max_position_embeddings=1 << 17)
    (folder / "config.json").write_text(json.dumps(base, indent=1), encoding="utf-8")
    for name in _TOKENIZER_FILES:
        copyfile(source / name, folder / name)
    return folder


def engine_arguments(spec: VirtualSpec, folder: Path) -> dict[str, Any]:
    """Return vLLM's engine arguments for a virtual engine whose model folder has been written."""
    from apar_core.scheduler.fork_settings import CONFIG_KEY
    from apar_core.virtual.executor import AsyncVirtualExecutor, VirtualExecutor

    scheduler = "ForkAsyncScheduler" if spec.is_async else "ForkScheduler"
    return {
        "model": str(folder),
        "distributed_executor_backend": AsyncVirtualExecutor if spec.is_async else VirtualExecutor,
        "scheduler_cls": f"apar_core.scheduler.fork_scheduler.{scheduler}",
        "load_format": "dummy",
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "dtype": "bfloat16",
        "block_size": spec.block_size,
        "num_gpu_blocks_override": spec.num_blocks,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_rows,
        "max_num_batched_tokens": spec.max_step_tokens,
        "additional_config": {CONFIG_KEY: dict(spec.forks or {})},
    }


def virtual_engine(spec: VirtualSpec, folder: Path) -> Any:
    """Return an `OfflineEngine` in virtual time with its `VirtualDevice` as `device`.

    The scheduler's step clock is the virtual one.
    """
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.virtual.executor import VirtualDevice

    arguments = engine_arguments(spec, write_model_folder(spec.config, folder))
    engine = OfflineEngine(arguments.pop("model"), **arguments)
    device = VirtualDevice(spec.costs)
    client: Any = engine.llm.llm_engine.engine_core
    client.engine_core.model_executor.device = device
    return engine, device
