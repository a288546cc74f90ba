"""The decoders of a speed evaluation, over one model: a checkpoint's or one of random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from apar_core.decoders.interface import AnswerDecoder
from apar_core.decoders.load import load_decoder
from apar_core.errors import EvaluationError
from apar_core.evaluation.random_model import random_model
from apar_core.evaluation.replay_text import ModelText
from apar_core.evaluation.speed_settings import SpeedSettings

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Decoders:
    """Decoders by name: those that are measured, and the one that they are compared with."""

    measured: Mapping[str, AnswerDecoder]
    baseline_name: str | None = None
    baseline: AnswerDecoder | None = None

    def in_turn(self, number: int) -> list[tuple[str, AnswerDecoder]]:
        """Return all of them; the order alternates with `number`, so that none gains by it."""
        pairs = list(self.measured.items())
        if self.baseline_name is not None and self.baseline is not None:
            pairs.append((self.baseline_name, self.baseline))
        return pairs if number % 2 == 0 else pairs[::-1]


def choose_device(wanted: str) -> str:
    """Return the device to run on; "auto" takes a CUDA GPU where there is one."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise EvaluationError(f"--device {wanted}: this machine has no CUDA GPU")
    return wanted


def choose_dtype(wanted: str, device: str) -> torch.dtype:
    """Return the dtype to run in; "auto" is float32 on a CPU and bfloat16 elsewhere."""
    if wanted == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if wanted not in _DTYPES:
        raise EvaluationError(f"--dtype {wanted!r} is none of auto, {', '.join(_DTYPES)}")
    return _DTYPES[wanted]


def load_decoders(settings: SpeedSettings, text: ModelText) -> Decoders:
    """Return the decoders of one model, loaded once and shared by all of them.

    Raises EvaluationError if the model cannot be loaded.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    model = _model(settings, text, dtype, device)

    def build(name: str) -> AnswerDecoder:
        heads = settings.medusa_heads if name == "medusa_apar" else None
        return load_decoder(
            name, model, text.tokenizer, medusa_heads=heads, device=device, dtype=dtype
        )

    return Decoders(
        measured={name: build(name) for name in settings.decoders},
        baseline_name=settings.baseline,
        baseline=build(settings.baseline) if settings.baseline is not None else None,
    )


def _model(
    settings: SpeedSettings, text: ModelText, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    if settings.random_weights is not None:
        return random_model(
            settings.random_weights,
            vocabulary_size=text.vocabulary_size,
            dtype=dtype,
            device=device,
        )
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EvaluationError(f"no model in {settings.model!r}: {reason}") from error
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded
