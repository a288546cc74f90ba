"""vLLM engines in virtual time: their specification, their arguments, and the whole engine.

```python
with VirtualEngine(VirtualSpec(config, costs, kv_tokens=108_304)) as engine:
    engine.generate(prompts, sampling)
    engine.device.clock.now_s  # seconds on the device that the costs describe
```

A run depends only on its requests: two processes give the same bytes. Requests added without an
arrival time get strictly increasing times from the virtual clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.step_costs.costs import StepCosts

if TYPE_CHECKING:
    from cluster.lab.virtual.shared_reads import Grouping

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_FURTHER_FILES = ("chat_template.jinja", "generation_config.json")
_DIMENSIONS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
# Tokens per step: vLLM's default for its OpenAI server on a GPU with 70 GiB or more (vllm 0.32,
# engine/arg_utils.py). The limit on rows is far above any experiment.
MAX_STEP_TOKENS = 8192
MAX_ROWS = 4096


@dataclass(frozen=True, slots=True)
class VirtualSpec:
    """A virtual engine: a model's shape, step costs, and KV memory.

    config: the model's Hugging Face configuration; only its dimensions matter.
    kv_tokens: tokens of KV cache, rounded down to blocks.
    max_rows, max_step_tokens: vLLM's `max_num_seqs` and `max_num_batched_tokens`.
    is_async: asynchronous scheduling, as vLLM does on GPUs; False as on a CPU.
    forks: the server's fork settings, for example `{"max_threads": 4}`.
    attention: family attention; None: each row reads its own KV blocks.
    checkpoint: a model folder, for its tokenizer.
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
    attention: Grouping | None = None
    checkpoint: Path = field(default_factory=checkpoint_path)

    @property
    def num_blocks(self) -> int:
        """KV blocks of the engine, vLLM's null block included."""
        return self.kv_tokens // self.block_size + 1


def write_model_folder(config: Mapping[str, Any], folder: Path, source: Path) -> Path:
    """Write a model folder without weights, with vocabulary and tokenizer of `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads((source / "config.json").read_text(encoding="utf-8"))
    given = {name: config[name] for name in _DIMENSIONS if config.get(name) is not None}
    model.pop("head_dim", None)
    model["num_key_value_heads"] = config["num_attention_heads"]
    model.update(given, max_position_embeddings=1 << 17)
    (folder / "config.json").write_text(json.dumps(model, indent=1), encoding="utf-8")
    further = [name for name in _FURTHER_FILES if (source / name).exists()]
    for name in (*_TOKENIZER_FILES, *further):
        copyfile(source / name, folder / name)
    return folder


def engine_arguments(spec: VirtualSpec, folder: Path) -> dict[str, Any]:
    """Return vLLM's engine arguments for a virtual engine whose model folder has been written."""
    from apar_core.engine.async_engine import SCHEDULER_CLS
    from apar_core.scheduler.fork_settings import CONFIG_KEY
    from cluster.lab.virtual.executor import AsyncVirtualExecutor, VirtualExecutor

    return {
        "model": str(folder),
        "distributed_executor_backend": AsyncVirtualExecutor if spec.is_async else VirtualExecutor,
        "scheduler_cls": SCHEDULER_CLS,
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


class VirtualEngine(OfflineEngine):
    """An `OfflineEngine` without a model; `device` has its clock, costs and counts.

    It owns its model folder, and removes it with `shutdown` or at the end of a `with` block.
    Several engines may live in one process, each with its own clock.
    """

    def __init__(self, spec: VirtualSpec) -> None:
        """Start an engine, which takes about 2 seconds."""
        # Imports vLLM, which takes seconds.
        from cluster.lab.virtual.executor import VirtualDevice

        self.spec = spec
        self._temporary = TemporaryDirectory(prefix="apar-virtual-")
        self.folder = write_model_folder(spec.config, Path(self._temporary.name), spec.checkpoint)
        arguments = engine_arguments(spec, self.folder)
        super().__init__(arguments.pop("model"), **arguments)
        self.device = VirtualDevice(spec.costs, attention=spec.attention)
        core = self._engine.engine_core.engine_core
        core.model_executor.attach(self.device, core.scheduler)
        self._add_request = self._engine.add_request
        self._engine.add_request = self._add_with_virtual_arrival

    def shutdown(self) -> None:
        """Shut the engine down and remove its model folder; a second call has no effect."""
        super().shutdown()
        self._temporary.cleanup()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Shut the engine down."""
        self.shutdown()

    def _add_with_virtual_arrival(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        arrival_time: float | None = None,
        **arguments: Any,
    ) -> str:
        if arrival_time is None:
            arrival_time = self.device.clock.arrival_s()
        name: str = self._add_request(request_id, prompt, params, arrival_time, **arguments)
        return name
