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
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from apar_core.errors import CheckpointError
from apar_core.offline.speculation.medusa_heads import read_settings

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MODEL_TYPE = "ppd_prompt_tokens"

# Values per weight that the fingerprint of a model reads.
_VALUES_PER_WEIGHT = 64


class PromptTokenSettings(BaseModel):
    """Sizes of the prompt tokens and the model they belong to, as in `config.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_prompts: PositiveInt = Field(3, description="Prompt tokens behind a token.")
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
    fingerprint: str = Field(description="Fingerprint of the model, by `model_fingerprint`.")


class PromptTokens(nn.Module):
    """Embeddings [M, E, D] of the prompt tokens of one model.

    `weights` [M, E] of the members are trained with `average: learned`, and else None.
    """

    def __init__(self, settings: PromptTokenSettings) -> None:
        super().__init__()
        self.settings = settings
        size = (settings.num_prompts, settings.ensemble)
        self.embeddings = nn.Parameter(torch.zeros(*size, settings.hidden_size))
        self.weights: nn.Parameter | None = None
        if settings.average == "learned":
            self.weights = nn.Parameter(torch.full(size, 1 / settings.ensemble))

    @classmethod
    def like_text(
        cls,
        model: PreTrainedModel,
        *,
        num_prompts: int = 3,
        ensemble: int = 1,
        seed: int = 0,
        **settings: Any,
    ) -> Self:
        """Initialize each embedding in float32 as that of a random token of the vocabulary.

        `settings` are further fields of PromptTokenSettings. Source: PPD, section 5, "Training".
        """
        rows = model.get_input_embeddings().weight
        assert isinstance(rows, Tensor)
        prompts = cls(
            PromptTokenSettings(
                num_prompts=num_prompts,
                ensemble=ensemble,
                hidden_size=rows.shape[1],
                fingerprint=model_fingerprint(model),
                **settings,
            )
        ).to(rows.device)
        generator = torch.Generator().manual_seed(seed)
        chosen_ME = torch.randint(len(rows), (num_prompts, ensemble), generator=generator)
        with torch.no_grad():
            prompts.embeddings.copy_(rows[chosen_ME.to(rows.device)])
        return prompts

    def forward(self) -> Tensor:
        """Return the embeddings [M, E, D]; trainers need a forward pass to exchange gradients."""
        return self.embeddings

    def merged(self, hidden_KED: Tensor, distance_K: Tensor) -> Tensor:
        """Average the hidden states of an ensemble where that equals averaging its logits.

        The output layer is linear, so logits are averaged before it: the result [K, 1, D] needs one
        logit vector instead of E. For probabilities the hidden states are returned as they are.
        `distance_K` has the prompt token, from 0, that each ensemble belongs to.
        """
        if self.settings.average == "probabilities":
            return hidden_KED
        if self.weights is None:
            return hidden_KED.mean(-2, keepdim=True)
        weights_KE = self.weights[distance_K].to(hidden_KED.dtype)
        return (weights_KE[..., None] * hidden_KED).sum(-2, keepdim=True)

    def combined(self, logits_EV: Tensor) -> Tensor:
        """Return one prediction [..., V] from the logits of what `merged` returned.

        The result is log-probabilities up to a constant: its softmax is the distribution.
        """
        if logits_EV.shape[-2] == 1:
            return logits_EV.squeeze(-2)
        return logits_EV.log_softmax(-1).logsumexp(-2) - math.log(logits_EV.shape[-2])


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
    weights = {
        name: tensor.detach().cpu().contiguous() for name, tensor in prompts.state_dict().items()
    }
    config = {
        "model_type": MODEL_TYPE,
        **prompts.settings.model_dump(),
        "dtype": str(prompts.embeddings.dtype).removeprefix("torch."),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_prompt_tokens(folder: str | Path) -> PromptTokens:
    """Load prompt tokens to the CPU in the dtype of their file.

    Raises CheckpointError naming the file, field or weight that is missing or does not match.
    `check_prompt_tokens` compares them with a model.
    """
    folder = Path(folder)
    settings = read_settings(folder / CONFIG_FILE, "prompt tokens", MODEL_TYPE, PromptTokenSettings)
    path = folder / WEIGHTS_FILE
    try:
        weights = load_file(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the prompt tokens in {path}: {error}") from error
    prompts = PromptTokens(settings)
    wanted = prompts.state_dict()
    if weights.keys() != wanted.keys():
        raise CheckpointError(f"{path}: weights must be {sorted(wanted)}, got {sorted(weights)}")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)}, the configuration asks for "
                f"{list(wanted[name].shape)}"
            )
    prompts.load_state_dict(weights, assign=True)
    return prompts.eval()
