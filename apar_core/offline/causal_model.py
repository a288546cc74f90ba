"""Loading of models for transformers, with the adapter in their folder if there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from safetensors.torch import load_file
from torch import nn
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
    """Add an adapter of `apar train` to a model's weights.

    Its change of an output head that is tied to the embeddings is the same as theirs, and counts
    once.
    """
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    factors = load_file(folder / "adapter_model.safetensors")
    head = model.get_output_embeddings()
    embeddings: Any = model.get_input_embeddings()
    is_tied = head is not None and head.weight is embeddings.weight
    for key, first in factors.items():
        owner, is_first, suffix = key.removeprefix(_PREFIX).partition(".lora_A")
        if not is_first:
            owner, is_first, suffix = key.removeprefix(_PREFIX).partition(".lora_embedding_A")
        if not is_first:
            continue
        second = factors[f"{_PREFIX}{owner}{is_first[:-1]}B{suffix}"]
        module: Any = model.get_submodule(owner)
        if module is head and is_tied:
            continue
        leaf = owner.rpartition(".")[2]
        rank = config["rank_pattern"].get(leaf, config["r"])
        scale = config["alpha_pattern"].get(leaf, config["lora_alpha"]) / rank
        change = scale * (second.float() @ first.float())
        if isinstance(module, nn.Embedding):
            change = change.T
        weight = module.weight
        weight.copy_((weight.float() + change.to(weight.device)).to(weight.dtype))


def count_parameters(name_or_path: str | Path) -> int:
    """Return the number of a model's parameters; only its configuration is read.

    Raises OSError and ValueError as transformers does.
    """
    config = AutoConfig.from_pretrained(str(name_or_path))
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
