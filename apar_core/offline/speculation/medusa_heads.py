"""Medusa heads and their checkpoint format, which vLLM's medusa method loads.

Head i (from 0) reads the hidden state that predicts the next token and proposes the token i + 2
places ahead. A head has a vocabulary matrix of its own, or uses the model's output layer, which
makes it smaller by far. Source: Medusa (arXiv 2401.10774), section 2.1.
Dimensions: H heads, D hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from apar_core.errors import CheckpointError
from apar_core.file_modes import share_weights
from apar_core.formats.config_file import CONFIG_FILE, read_settings

WEIGHTS_FILE = "model.safetensors"
MODEL_TYPE = "medusa"
# A type of its own, because vLLM would fill a missing vocabulary matrix with random values.
_SHARED_MODEL_TYPE = "medusa_original_lm_head"


class MedusaHeadSettings(BaseModel):
    """Sizes of the heads, with the names in `config.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    hidden_size: PositiveInt
    vocab_size: PositiveInt
    medusa_num_heads: PositiveInt = 2
    medusa_num_layers: PositiveInt = 2
    medusa_fc_bias: bool = Field(False, description="Whether the residual layers have a bias.")
    original_lm_head: bool = Field(
        False, description="Whether the heads use the model's output layer."
    )


class ResidualBlock(nn.Module):
    """Stack of layers that add the SiLU of a linear map to their input."""

    def __init__(self, settings: MedusaHeadSettings) -> None:
        super().__init__()
        size = settings.hidden_size
        self.layers = nn.ModuleList(
            nn.Linear(size, size, bias=settings.medusa_fc_bias)
            for _ in range(settings.medusa_num_layers)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., D] to the input [..., D] of the head's vocabulary matrix."""
        for layer in self.layers:
            hidden = hidden + nn.functional.silu(layer(hidden))
        return hidden


class MedusaHeads(nn.Module):
    """All heads of a model; they read the input of the model's output layer."""

    def __init__(self, settings: MedusaHeadSettings) -> None:
        super().__init__()
        self.settings = settings
        heads = range(settings.medusa_num_heads)
        self.blocks = nn.ModuleList(ResidualBlock(settings) for _ in heads)
        self.lm_heads = nn.ModuleList(
            nn.Linear(settings.hidden_size, settings.vocab_size, bias=False)
            for _ in (() if settings.original_lm_head else heads)
        )

    @classmethod
    def like_lm_head(
        cls,
        lm_head_VD: Tensor,
        *,
        num_heads: int = 2,
        num_layers: int = 2,
        original_lm_head: bool = False,
    ) -> Self:
        """Initialize heads that predict as the model's output layer: residual layers of zero.

        They have the dtype and device of `lm_head_VD`.
        """
        vocab_size, hidden_size = lm_head_VD.shape
        settings = MedusaHeadSettings(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            medusa_num_heads=num_heads,
            medusa_num_layers=num_layers,
            original_lm_head=original_lm_head,
        )
        heads = cls(settings).to(device=lm_head_VD.device, dtype=lm_head_VD.dtype)
        with torch.no_grad():
            for parameter in heads.blocks.parameters():
                parameter.zero_()
            for parameter in heads.lm_heads.parameters():
                parameter.copy_(lm_head_VD)
        return heads

    def forward(self, hidden: Tensor, output_layer: Any = None) -> Tensor:
        """Return the heads' logits [H, ..., V] for hidden states [..., D].

        `output_layer` is the model's, which heads without a vocabulary matrix need.
        """
        matrices = self.lm_heads or [output_layer] * len(self.blocks)
        return torch.stack(
            [
                matrix(block(hidden).to(matrix.weight.dtype))
                for block, matrix in zip(self.blocks, matrices, strict=True)
            ]
        )


def save_medusa_heads(heads: MedusaHeads, folder: str | Path) -> None:
    """Write `config.json` and safetensors in the dtype of the heads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in _weights(heads).items()}
    config = {
        "model_type": _SHARED_MODEL_TYPE if heads.settings.original_lm_head else MODEL_TYPE,
        "architectures": ["MedusaModel"],
        **heads.settings.model_dump(),
        "dtype": str(next(iter(weights.values())).dtype).removeprefix("torch."),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    share_weights(folder / CONFIG_FILE)


def load_medusa_heads(folder: str | Path) -> MedusaHeads:
    """Load heads to the CPU in the dtype of their file.

    Raises CheckpointError naming the file, field or weight that is missing or does not match.
    """
    folder = Path(folder)
    settings = read_settings(
        folder / CONFIG_FILE,
        "Medusa heads",
        (MODEL_TYPE, _SHARED_MODEL_TYPE),
        MedusaHeadSettings,
        _vllm_settings,
    )
    weights = _read_weights(folder)
    heads = MedusaHeads(settings)
    wanted = _weights(heads)
    missing, unknown = wanted.keys() - weights.keys(), weights.keys() - wanted.keys()
    if missing or unknown:
        raise CheckpointError(
            f"Medusa heads in {folder}: weights missing {sorted(missing)}, unknown "
            f"{sorted(unknown)}; {settings.medusa_num_heads} heads of "
            f"{settings.medusa_num_layers} layers are configured"
        )
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"Medusa heads in {folder}: weight {name} has shape {list(tensor.shape)}, the "
                f"configuration asks for {list(wanted[name].shape)}"
            )
    heads.load_state_dict(dict(weights), assign=True)
    return heads.eval()


def _weights(heads: MedusaHeads) -> dict[str, Tensor]:
    return dict(heads.state_dict())


def _vllm_settings(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields by our names. Raises CheckpointError for heads of a reduced vocabulary."""
    truncated = config.get("truncated_vocab_size")
    if truncated is not None and truncated != config.get("vocab_size"):
        raise CheckpointError(
            f"{path}: truncated_vocab_size {truncated} is not supported: heads must propose from "
            f"the whole vocabulary ({config.get('vocab_size')})"
        )
    return _renamed_keys(config)


def _renamed_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rename keys as vLLM does: any with "num" and "heads" (or "layers") gives their number."""
    named: dict[str, Any] = {}
    for key, value in config.items():
        if "num" in key and "heads" in key:
            named["medusa_num_heads"] = value
        elif "num" in key and "layers" in key:
            named["medusa_num_layers"] = value
        else:
            named[key] = value
    return named


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no safetensors file with Medusa heads in {folder}")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors = load_file(file)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"cannot read the Medusa heads in {file}: {error}") from error
        weights.update({_current_name(name): tensor for name, tensor in tensors.items()})
    return weights


def _current_name(name: str) -> str:
    """Convert weight names of Medusa's first checkpoints to those of vLLM.

    In old checkpoints "0.1.linear.weight" is a residual layer, "0.2.weight" a vocabulary matrix.
    """
    name = name.removeprefix("medusa_heads.")
    head, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    if not (head.isdigit() and layer.isdigit()):
        return name
    if rest.startswith("linear."):
        return f"blocks.{head}.layers.{layer}.{rest.removeprefix('linear.')}"
    return f"lm_heads.{head}.{rest}"
