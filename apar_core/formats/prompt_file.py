"""Files of trained prompt tokens, and the fingerprint of the model that they belong to.

A folder has `config.json` and safetensors with the embeddings [M, E, D]: M prompt tokens, E members
of an ensemble, D hidden size. Offline decoders and vLLM's workers read them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from apar_core.errors import CheckpointError

CONFIG_FILE = "config.json"
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

    num_prompts: PositiveInt = Field(3, description="Prompt tokens behind a token.")
    ensemble: PositiveInt = Field(1, description="Embeddings per prompt token.")
    hidden_size: PositiveInt = Field(description="Hidden size of the model.")
    average: Literal["logits", "probabilities"] = Field(
        "logits",
        description="What an ensemble averages. The paper's text has logits, its formula "
        "probabilities (section 3.2).",
    )
    fingerprint: str = Field(description="Fingerprint of the model, by `weights_fingerprint`.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape [M, E, D] of the embeddings."""
        return self.num_prompts, self.ensemble, self.hidden_size


def write_prompt_file(
    settings: PromptTokenSettings, embeddings_MED: Tensor, folder: str | Path
) -> None:
    """Write `config.json` and safetensors in the dtype of the embeddings."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    embeddings_MED = embeddings_MED.detach().cpu().contiguous()
    config = {
        "model_type": MODEL_TYPE,
        **settings.model_dump(),
        "dtype": str(embeddings_MED.dtype).removeprefix("torch."),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    save_file({_EMBEDDINGS: embeddings_MED}, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def read_prompt_file(folder: str | Path) -> tuple[PromptTokenSettings, Tensor]:
    """Return settings and embeddings [M, E, D], on the CPU and in the dtype of their file.

    Raises CheckpointError naming the file, field or weight that is missing or does not match.
    """
    folder = Path(folder)
    settings = _read_settings(folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    try:
        weights = load_file(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the prompt tokens in {path}: {error}") from error
    if weights.keys() != {_EMBEDDINGS}:
        raise CheckpointError(f"{path}: weights must be ['{_EMBEDDINGS}'], got {sorted(weights)}")
    embeddings_MED = weights[_EMBEDDINGS]
    if embeddings_MED.shape != settings.shape:
        raise CheckpointError(
            f"{path}: {_EMBEDDINGS} has shape {list(embeddings_MED.shape)}, the configuration asks "
            f"for {list(settings.shape)}"
        )
    return settings, embeddings_MED


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


def _read_settings(path: Path) -> PromptTokenSettings:
    try:
        config = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"no configuration of prompt tokens in {path}: {error}") from error
    found = config.get("model_type") if isinstance(config, dict) else config
    if found != MODEL_TYPE:
        raise CheckpointError(f"{path}: model_type must be {MODEL_TYPE!r}, got {found!r}")
    try:
        return PromptTokenSettings.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"{path}: {field}: {first['msg']} (got {first['input']!r})"
        ) from error
