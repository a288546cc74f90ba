"""Prompt tokens: trained embeddings that make a model predict several tokens in one pass.

The M prompt tokens follow a token x. In the same pass, x predicts the next token, and prompt token
d (from 0) predicts the token d + 2 places after x. Each prompt token is an ensemble of E
embeddings; member e reads the path to x and the members e of the prompt tokens before it, nothing
else. No ordinary token reads a prompt token. Source: PPD (arXiv 2405.18628), sections 3.1 and 3.2.
Dimensions: M prompt tokens, E members, D hidden size, V vocabulary, L layers, H key-value heads.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from apar_core.formats.prompt_file import (
    PromptTokenSettings,
    check_model,
    read_prompt_tensors,
    weights_fingerprint,
    write_prompt_file,
)

_PREFIX_SPREAD = 0.02


class PromptTokens(nn.Module):
    """Embeddings [M, E, D] of the prompt tokens of one model, and what variants train with them.

    `weights` [M, E] of the members, keys and values of a `prefix` [L, 2, M, H, D] and an output
    layer `head` [V, D] are None unless the settings have them.
    """

    def __init__(self, settings: PromptTokenSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embeddings = nn.Parameter(torch.zeros(settings.shape))
        self.weights = self._optional("weights", 1 / settings.ensemble)
        self.prefix = self._optional("prefix")
        self.head = self._optional("head")

    def _optional(self, name: str, value: float = 0.0) -> nn.Parameter | None:
        shape = self.settings.shapes.get(name)
        return None if shape is None else nn.Parameter(torch.full(shape, value))

    @classmethod
    def like_text(
        cls,
        model: PreTrainedModel,
        *,
        num_prompts: int = 3,
        ensemble: int = 1,
        seed: int = 0,
        prefix: bool = False,
        head: bool = False,
        **settings: Any,
    ) -> Self:
        """Initialize each embedding in float32 as that of a random token of the vocabulary.

        A `prefix` starts with small random values, a `head` as a copy of the output layer.
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
                prefix=_prefix_shape(model, num_prompts) if prefix else None,
                head=tuple(_output_rows(model).shape) if head else None,
                **settings,
            )
        ).to(rows.device)
        generator = torch.Generator().manual_seed(seed)
        chosen_ME = torch.randint(len(rows), (num_prompts, ensemble), generator=generator)
        with torch.no_grad():
            prompts.embeddings.copy_(rows[chosen_ME.to(rows.device)])
            if prompts.prefix is not None:
                drawn = torch.randn(prompts.prefix.shape, generator=generator)
                prompts.prefix.copy_(_PREFIX_SPREAD * drawn)
            if prompts.head is not None:
                prompts.head.copy_(_output_rows(model))
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


def _output_rows(model: PreTrainedModel) -> Tensor:
    weight = model.get_output_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def _prefix_shape(model: PreTrainedModel, num_prompts: int) -> tuple[int, ...]:
    config: Any = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_hidden_layers, 2, num_prompts, num_heads, size


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return the fingerprint of a model's weights: see `weights_fingerprint`."""
    return weights_fingerprint(
        (name, weight.shape, weight) for name, weight in model.named_parameters()
    )


def check_prompt_tokens(prompts: PromptTokens, model: PreTrainedModel) -> None:
    """Raise CheckpointError if the prompt tokens were trained for another model."""
    check_model(
        prompts.settings,
        hidden_size=model.config.get_text_config().hidden_size,
        fingerprint=model_fingerprint(model),
    )


def save_prompt_tokens(prompts: PromptTokens, folder: str | Path) -> None:
    """Write `config.json` and safetensors in the dtype of the embeddings."""
    write_prompt_file(prompts.settings, dict(prompts.state_dict()), folder)


def load_prompt_tokens(folder: str | Path) -> PromptTokens:
    """Load prompt tokens to the CPU in the dtype of their file.

    Raises CheckpointError naming the file, field or weight that is missing or does not match.
    `check_prompt_tokens` compares them with a model.
    """
    settings, tensors = read_prompt_tensors(folder)
    prompts = PromptTokens(settings)
    prompts.load_state_dict(tensors, assign=True)
    return prompts.eval()
