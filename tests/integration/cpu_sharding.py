"""FSDP2 on CPU processes, which accelerate supports on GPUs only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]

from apar_core.offline.training import recipe

FSDP = Path(recipe.__file__).with_name("fsdp.yaml")


def shard_on_cpu() -> None:
    """Shard models over torchrun's processes with the settings of the shipped fsdp.yaml.

    `accelerate launch` passes them on as these environment variables.
    """
    settings = yaml.safe_load(FSDP.read_text())["fsdp_config"]
    os.environ |= {name.upper(): str(value).lower() for name, value in settings.items()}
    os.environ["FSDP_AUTO_WRAP_POLICY"] = settings["fsdp_auto_wrap_policy"]
    os.environ["FSDP_STATE_DICT_TYPE"] = settings["fsdp_state_dict_type"]
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    build = AcceleratorState.__init__

    def build_sharding(state: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        build(state, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None:
            if state._mixed_precision != "no":
                plugin.set_mixed_precision(state._mixed_precision)
            state.fsdp_plugin = plugin
        if getattr(state, "fsdp_plugin", None) is not None:
            state.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = build_sharding
