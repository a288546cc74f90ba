"""Loading of models for transformers, with the adapter in their folder if there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from apar_core.checkpoint_folder import ADAPTER_CONFIG, adapter_in

_PREFIX = "base_model.model."


def load_causal_model(name_or_path: str | Path, **arguments: Any) -> PreTrainedModel:
    """Return the model of a folder or hub name; `arguments` are those of `from_pretrained`.

    The adapter that `apar train` left beside the weights is merged into them: transformers decodes
    with one set of weights. Raises OSError and ValueError as transformers does.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(name_or_path), **arguments)
    if (adapter := adapter_in(name_or_path)) is not None:
        merge_adapter(model, adapter)
    return model


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Add an adapter of `apar train` to a model's weights."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    factors = load_file(folder / "adapter_model.safetensors")
    for name, first in factors.items():
        owner, is_first, _ = name.removeprefix(_PREFIX).partition(".lora_A")
        if is_first:
            weight = model.get_parameter(f"{owner}.weight")
            second = factors[f"{_PREFIX}{owner}.lora_B.weight"]
            change = config["lora_alpha"] / config["r"] * (second.float() @ first.float())
            weight.copy_((weight.float() + change.to(weight.device)).to(weight.dtype))


def count_parameters(name_or_path: str | Path) -> int:
    """Return the number of a model's parameters; only its configuration is read.

    Raises OSError and ValueError as transformers does.
    """
    config = AutoConfig.from_pretrained(str(name_or_path))
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
