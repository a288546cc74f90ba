"""Save a trained LoRA adapter for serving beside its base model, without merging.

vLLM serves low-rank factors only. It takes no module that was trained in full, no single rows of
the embeddings (PEFT's `trainable_token_indices`), and no additional vocabulary. The rows of a
format's tokens are trained in full, so they are written as factors with a rank for each token: a
matrix of zeros and ones that selects the tokens, times the difference of their rows. This is exact.
PEFT loads such an adapter too, but must not merge it into a model with tied embeddings, where the
difference would count twice. Sources: `vllm/lora/peft_helper.py`, `vllm/lora/lora_model.py`.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.trainable_tokens import TrainableTokensLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from apar_core.file_modes import share_weights

_ADAPTER_NAME = "default"
_FACTORS = (".lora_A.", ".lora_B.")


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write a model's adapter (float32) and its configuration.

    The base model beside it must be saved in bfloat16, with its original rows of the format's
    tokens.
    """
    tensors = {
        name: tensor
        for name, tensor in get_peft_model_state_dict(model).items()
        if any(factor in name for factor in _FACTORS)
    }
    config = deepcopy(model.peft_config[_ADAPTER_NAME])
    assert isinstance(config, LoraConfig)
    ranks: dict[str, int] = {}
    # A recipe's names may be a pattern, which cannot be extended.
    targets = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
    for name, module in model.named_modules():
        if isinstance(module, TrainableTokensLayer):
            owner = name.removesuffix(".token_adapter")
            tensors |= row_factors(module, owner)
            ranks[owner.rpartition(".")[2]] = len(module.token_indices[_ADAPTER_NAME])
    config.rank_pattern = ranks
    # An adapter is scaled by alpha / rank, which is 1 for these.
    config.alpha_pattern = dict(ranks)
    config.target_modules = sorted(targets | ranks.keys())
    config.trainable_token_indices = None
    config.inference_mode = True
    config.base_model_name_or_path = str(folder.parent)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    whole = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    share_weights(folder / "adapter_config.json")


def row_factors(layer: TrainableTokensLayer, name: str) -> dict[str, Tensor]:
    """Return the change of a layer's trained rows as low-rank factors, by PEFT's names.

    The layer is an embedding or an output head with V rows of D numbers; T rows are trained.
    """
    token_ids = list(layer.token_indices[_ADAPTER_NAME])
    before_TD = layer.trainable_tokens_original[_ADAPTER_NAME].to(torch.bfloat16).float()
    change_TD = layer.trainable_tokens_delta[_ADAPTER_NAME].detach().float() - before_TD
    base = layer.get_base_layer()
    weight = base.weight
    assert isinstance(weight, Tensor)
    selected_TV = torch.zeros(len(token_ids), len(weight))
    selected_TV[range(len(token_ids)), token_ids] = 1.0
    if isinstance(base, nn.Embedding):
        return {
            f"{name}.lora_embedding_A": selected_TV,
            f"{name}.lora_embedding_B": change_TD.T,
        }
    return {f"{name}.lora_A.weight": change_TD, f"{name}.lora_B.weight": selected_TV.T}
