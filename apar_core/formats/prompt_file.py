"""Files of trained prompt tokens, and the fingerprint of the model that they belong to.

A folder has `config.json` and safetensors with the embeddings [M, E, D]: M prompt tokens, E members
of an ensemble, D hidden size. Offline decoders and vLLM's workers read them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from apar_core.errors import CheckpointError
from apar_core.file_modes import share_weights
from apar_core.formats.config_file import CONFIG_FILE, read_settings

WEIGHTS_FILE = "model.safetensors"
MODEL_TYPE = "ppd_prompt_tokens"
_EMBEDDINGS = "embeddings"

# Values per weight that the fingerprint of a model reads.
_VALUES_PER_WEIGHT = 64
# Buffers that older checkpoints store beside the weights.
_BUFFER_SUFFIX = "rotary_emb.inv_freq"


class PromptTokenSettings(BaseModel):
    """Sizes of the prompt tokens and the model they belong to, as in `config.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_prompts: PositiveInt = Field(3, description="Prompt tokens after a token.")
    ensemble: PositiveInt = Field(1, description="Embeddings per prompt token.")
    hidden_size: PositiveInt = Field(description="Hidden size of the model.")
    average: Literal["logits", "probabilities", "learned"] = Field(
        "logits",
        description="What an ensemble averages. The paper's text has logits, its formula "
        "probabilities (section 3.2), appendix B.6 logits with learned weights.",
    )
    mask: Literal["ensemble", "decoder", "encoder"] = Field(
        "ensemble", description="Which prompt tokens an embedding reads (appendix B.5)."
    )
    exits: PositiveInt = Field(
        1, description="Last layers whose hidden states are averaged (appendix B.7)."
    )
    prefix: tuple[PositiveInt, ...] | None = Field(
        None,
        description="Shape [L, 2, M, H, D] of trained keys and values in front of the text, those "
        "of each prompt token for itself (appendix B.3).",
    )
    head: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="Shape [V, D] of an output layer for prompt tokens (appendix B.4)."
    )
    fingerprint: str = Field(description="Fingerprint of the model, by `weights_fingerprint`.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape [M, E, D] of the embeddings."""
        return self.num_prompts, self.ensemble, self.hidden_size

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors by name: `embeddings`, and `weights`, `prefix`, `head` if any."""
        optional = {
            "weights": self.shape[:2] if self.average == "learned" else None,
            "prefix": self.prefix,
            "head": self.head,
        }
        return {_EMBEDDINGS: self.shape} | {
            name: shape for name, shape in optional.items() if shape is not None
        }


def write_prompt_file(
    settings: PromptTokenSettings, weights: Mapping[str, Tensor], folder: str | Path
) -> None:
    """Write `config.json` and safetensors with the tensors of `settings.shapes`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weights[name].detach().cpu().contiguous() for name in settings.shapes}
    config = {
        "model_type": MODEL_TYPE,
        **settings.model_dump(),
        "dtype": str(tensors[_EMBEDDINGS].dtype).removeprefix("torch."),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    share_weights(folder / CONFIG_FILE)


def read_prompt_file(folder: str | Path) -> tuple[PromptTokenSettings, Tensor]:
    """Return settings and embeddings [M, E, D], on the CPU and in the dtype of their file.

    Raises CheckpointError naming the file, field or weight that is missing or does not match.
    """
    settings, tensors = read_prompt_tensors(folder)
    return settings, tensors[_EMBEDDINGS]


def read_prompt_tensors(folder: str | Path) -> tuple[PromptTokenSettings, dict[str, Tensor]]:
    """Return settings and the tensors of `settings.shapes`.

    Raises CheckpointError as `read_prompt_file` does.
    """
    folder = Path(folder)
    settings = read_settings(
        folder / CONFIG_FILE, "prompt tokens", (MODEL_TYPE,), PromptTokenSettings
    )
    path = folder / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the prompt tokens in {path}: {error}") from error
    shapes = settings.shapes
    if tensors.keys() != shapes.keys():
        raise CheckpointError(f"{path}: weights must be {sorted(shapes)}, got {sorted(tensors)}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)}, the configuration asks for "
                f"{list(shapes[name])}"
            )
    return settings, tensors


def check_model(settings: PromptTokenSettings, *, hidden_size: int, fingerprint: str) -> None:
    """Raise CheckpointError if the prompt tokens were trained for another model."""
    if settings.hidden_size != hidden_size:
        raise CheckpointError(
            f"prompt tokens have hidden_size {settings.hidden_size}, the model has {hidden_size}"
        )
    if settings.fingerprint != fingerprint:
        raise CheckpointError(
            "prompt tokens were trained for another model: they have fingerprint "
            f"{settings.fingerprint}, the model has {fingerprint}"
        )


def refuse_variant(settings: PromptTokenSettings) -> None:
    """Raise CheckpointError for the paper's variants that nothing decodes and are only measured."""
    usual = {"mask": "ensemble", "exits": 1, "prefix": None, "head": None}
    for field, expected in usual.items():
        found = getattr(settings, field)
        if found != expected:
            raise CheckpointError(
                f"prompt tokens have {field} {found!r}, decoding needs {expected!r}: other values "
                "are for `apar evaluate ppd` only"
            )


def weights_fingerprint(weights: Iterable[tuple[str, Iterable[int], Tensor]]) -> str:
    """Return a digest of a model's weights that does not depend on device or loading dtype.

    Of each weight it takes name, shape and first values, rounded to bfloat16, so a fine-tuned model
    has another fingerprint than its base. The tensors may hold the first values only.
    """
    digest = hashlib.sha256()
    for name, shape, weight in sorted(weights, key=lambda each: each[0]):
        start = weight.detach().flatten()[:_VALUES_PER_WEIGHT].cpu().bfloat16()
        digest.update(f"{name} {list(shape)} ".encode())
        digest.update(start.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def files_fingerprint(files: Iterable[Path], *, tied: bool) -> str:
    """Return the fingerprint of a model from its safetensors files, without loading the weights.

    It equals that of the model in transformers if the files have transformers' own names. `tied`:
    whether the output layer is the embedding, so that a copy of it in the files does not count.
    """
    weights: list[tuple[str, list[int], Tensor]] = []
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # not a mapping
                if name.endswith(_BUFFER_SUFFIX) or (tied and name == "lm_head.weight"):
                    continue
                part = stored.get_slice(name)
                shape = part.get_shape()
                # Whole rows, as many as hold the first values.
                row_size = max(1, math.prod(shape[1:]))
                num_rows = -(-_VALUES_PER_WEIGHT // row_size)
                weights.append((name, shape, part[:num_rows] if shape else part[...]))
    return weights_fingerprint(weights)
