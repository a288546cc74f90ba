"""Prompt tokens: trained embeddings that make a model predict several tokens in one pass.

The M prompt tokens follow a token x. In the same pass, x predicts the next token, and prompt token
d (from 0) predicts the token d + 2 places after x. Each prompt token is an ensemble of E
embeddings; member e reads the path to x and the members e of the prompt tokens before it, nothing
else. No ordinary token reads a prompt token. Source: PPD (arXiv 2405.18628), sections 3.1 and 3.2.
Dimensions: M prompt tokens, E members, D hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from apar_core.errors import CheckpointError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MODEL_TYPE = "ppd_prompt_tokens"
_EMBEDDINGS = "embeddings"

# Values per weight that the fingerprint of a model reads.
_VALUES_PER_WEIGHT = 64


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
    fingerprint: str = Field(description="Fingerprint of the model, by `model_fingerprint`.")


class PromptTokens(nn.Module):
    """Embeddings [M, E, D] of the prompt tokens of one model."""

    def __init__(self, settings: PromptTokenSettings) -> None:
        super().__init__()
        self.settings = settings
        shape = (settings.num_prompts, settings.ensemble, settings.hidden_size)
        self.embeddings = nn.Parameter(torch.zeros(shape))

    @classmethod
    def like_text(
        cls,
        model: PreTrainedModel,
        *,
        num_prompts: int = 3,
        ensemble: int = 1,
        average: Literal["logits", "probabilities"] = "logits",
        seed: int = 0,
    ) -> Self:
        """Initialize each embedding in float32 as that of a random token of the vocabulary.

        Source: PPD, section 5, "Training".
        """
        rows = model.get_input_embeddings().weight
        assert isinstance(rows, Tensor)
        settings = PromptTokenSettings(
            num_prompts=num_prompts,
            ensemble=ensemble,
            hidden_size=rows.shape[1],
            average=average,
            fingerprint=model_fingerprint(model),
        )
        prompts = cls(settings).to(rows.device)
        generator = torch.Generator().manual_seed(seed)
        chosen_ME = torch.randint(len(rows), (num_prompts, ensemble), generator=generator)
        with torch.no_grad():
            prompts.embeddings.copy_(rows[chosen_ME.to(rows.device)])
        return prompts

    def forward(self) -> Tensor:
        """Return the embeddings [M, E, D]; trainers need a forward pass to exchange gradients."""
        return self.embeddings

    def combined(self, logits_EV: Tensor) -> Tensor:
        """Return one prediction [..., V] from the logits [..., E, V] of an ensemble.

        The result is log-probabilities up to a constant: its softmax is the distribution.
        """
        if self.settings.ensemble == 1:
            return logits_EV.squeeze(-2)
        if self.settings.average == "logits":
            return logits_EV.mean(-2)
        return logits_EV.log_softmax(-1).logsumexp(-2) - math.log(self.settings.ensemble)


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return a digest of the model's weights that does not depend on device or loading dtype.

    It reads the first values of every weight, rounded to bfloat16, so a fine-tuned model has
    another fingerprint than its base.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        start = weight.detach().flatten()[:_VALUES_PER_WEIGHT].cpu().bfloat16()
        digest.update(f"{name} {list(weight.shape)} ".encode())
        digest.update(start.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def check_prompt_tokens(prompts: PromptTokens, model: PreTrainedModel) -> None:
    """Raise CheckpointError if the prompt tokens were trained for another model."""
    hidden_size = model.config.get_text_config().hidden_size
    if prompts.settings.hidden_size != hidden_size:
        raise CheckpointError(
            f"prompt tokens have hidden_size {prompts.settings.hidden_size}, the model has "
            f"{hidden_size}"
        )
    fingerprint = model_fingerprint(model)
    if prompts.settings.fingerprint != fingerprint:
        raise CheckpointError(
            "prompt tokens were trained for another model: they have fingerprint "
            f"{prompts.settings.fingerprint}, the model has {fingerprint}"
        )


def save_prompt_tokens(prompts: PromptTokens, folder: str | Path) -> None:
    """Write `config.json` and safetensors in the dtype of the embeddings."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    embeddings_MED = prompts.embeddings.detach().cpu().contiguous()
    config = {
        "model_type": MODEL_TYPE,
        **prompts.settings.model_dump(),
        "dtype": str(embeddings_MED.dtype).removeprefix("torch."),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    save_file({_EMBEDDINGS: embeddings_MED}, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_prompt_tokens(folder: str | Path) -> PromptTokens:
    """Load prompt tokens to the CPU in the dtype of their file.

    Raises CheckpointError naming the file, field or weight that is missing or does not match.
    `check_prompt_tokens` compares them with a model.
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
    prompts = PromptTokens(settings)
    embeddings_MED = weights[_EMBEDDINGS]
    if embeddings_MED.shape != prompts.embeddings.shape:
        raise CheckpointError(
            f"{path}: {_EMBEDDINGS} has shape {list(embeddings_MED.shape)}, the configuration asks "
            f"for {list(prompts.embeddings.shape)}"
        )
    prompts.load_state_dict(weights, assign=True)
    return prompts.eval()


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
