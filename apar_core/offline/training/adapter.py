"""Save a trained LoRA adapter for serving beside its base model, without merging.

vLLM serves low-rank factors only, and those of embeddings and output heads for few architectures.
The rows of a format's tokens, which are trained in full, therefore go into the base model. There
APAR's tokens are banned in requests that may not fork; other formats ban none. Sources:
`vllm/lora/peft_helper.py`, `vllm/lora/lora_model.py`, and `embedding_modules` of vLLM's models.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.trainable_tokens import TrainableTokensLayer
from safetensors.torch import save_file
from transformers import PreTrainedModel

from apar_core.checkpoint_folder import ADAPTER_CONFIG
from apar_core.file_modes import share_weights

_ADAPTER_NAME = "default"
_FACTORS = (".lora_A.", ".lora_B.")


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the factors of a model's adapter (float32) and its configuration.

    The base model beside it must have the trained rows: see `base_with_trained_rows`.
    """
    tensors = {
        name: tensor.detach().float().cpu().contiguous()
        for name, tensor in get_peft_model_state_dict(model).items()
        if any(factor in name for factor in _FACTORS)
    }
    config = deepcopy(model.peft_config[_ADAPTER_NAME])
    assert isinstance(config, LoraConfig)
    # vLLM reads names, not the pattern that a recipe may give.
    config.target_modules = sorted({_module_of(name) for name in tensors})
    config.trainable_token_indices = None
    config.inference_mode = True
    config.base_model_name_or_path = str(folder.parent)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    share_weights(folder / ADAPTER_CONFIG)


def base_with_trained_rows(model: PeftModel) -> PreTrainedModel:
    """Return the model without its adapter, with the rows of the format's tokens as trained."""
    layers = [each for each in model.modules() if isinstance(each, TrainableTokensLayer)]
    rows: list[tuple[Any, list[int], Any]] = [
        (
            layer.get_base_layer().weight,
            list(layer.token_indices[_ADAPTER_NAME]),
            layer.trainable_tokens_delta[_ADAPTER_NAME].detach(),
        )
        for layer in layers
    ]
    unload: Any = model.unload
    base: PreTrainedModel = unload()
    with torch.no_grad():
        for weight_VD, token_ids, trained_TD in rows:
            weight_VD[token_ids] = trained_TD.to(weight_VD.dtype)
    return base


def _module_of(name: str) -> str:
    return name.partition(".lora_")[0].rpartition(".")[2]
