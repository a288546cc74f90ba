"""The LoRA adapter with which a model answers requests that may fork.

A base model that has learned to fork needs its adapter for that. Without forks the adapter harms:
with the fork token banned, the model ends its answer where it would have forked. So requests that
may not fork are answered by the base model alone, from the same engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from apar_core.checkpoint_folder import ADAPTER_CONFIG
from apar_core.errors import EngineError
from apar_core.vllm_names import LoRARequest, MaxLoRARanks

if TYPE_CHECKING:
    from apar_core.vllm_names import EngineArgs

_DEFAULT_RANK = 8
# vLLM's server numbers its adapters from 1.
_ID = 2**31 - 1


def fork_adapter_request(folder: Path) -> LoRARequest:
    """Return vLLM's description of the adapter, the same in each process and replica."""
    return LoRARequest("apar-forks", _ID, str(folder))


def prepare_fork_adapter(args: EngineArgs) -> None:
    """Make room for the fork adapter of an engine's settings, if there is one.

    Raises EngineError if its folder has no adapter.
    """
    additional = args.additional_config
    settings = additional.get("apar") if isinstance(additional, dict) else None
    given = settings.get("fork_adapter") if isinstance(settings, dict) else None
    if given is None or args.scheduler_cls is None:
        return
    folder = Path(given).expanduser()
    if not (folder / ADAPTER_CONFIG).is_file():
        raise EngineError(
            f"additional_config: apar.fork_adapter: {folder} has no {ADAPTER_CONFIG}: give the "
            "folder of a LoRA adapter"
        )
    # vLLM runs at most `max_loras` adapters in one step.
    args.max_loras = args.max_loras + 1 if args.enable_lora else 1
    known = args.max_lora_rank if args.enable_lora else _DEFAULT_RANK
    args.max_lora_rank = lora_rank([folder], at_least=known)
    args.enable_lora = True


def lora_rank(folders: Iterable[Path], *, at_least: int = _DEFAULT_RANK) -> MaxLoRARanks:
    """Return the smallest rank that vLLM can allocate for these adapters.

    Raises EngineError if there is none.
    """
    needed = at_least
    for folder in folders:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text())
        needed = max(needed, config.get("r", 1), *config.get("rank_pattern", {}).values())
    possible: tuple[MaxLoRARanks, ...] = get_args(MaxLoRARanks)
    for rank in possible:
        if rank >= needed:
            return rank
    raise EngineError(f"an adapter has rank {needed}, and vLLM serves at most {possible[-1]}")
