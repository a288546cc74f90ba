"""The decoders of a speed evaluation, over a checkpoint or a model of random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from apar_core.errors import EvaluationError
from apar_core.offline.decoders.interface import AnswerDecoder
from apar_core.offline.decoders.load import load_decoder
from apar_core.offline.evaluation.random_model import random_model
from apar_core.offline.evaluation.replay_text import ModelText, load_text
from apar_core.offline.evaluation.speed_settings import SpeedSettings

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class NamedDecoder:
    """A decoder of a kind (as in `load_decoder`) under the name that its answers are kept with.

    `text` has the tokens of its model.
    """

    name: str
    kind: str
    decoder: AnswerDecoder
    text: ModelText


@dataclass(frozen=True, slots=True)
class Decoders:
    """Decoders that are measured, and the one that they are compared with.

    `repeats_text` tells whether the baseline is forced to the text of the first decoder.
    """

    measured: tuple[NamedDecoder, ...]
    baseline: NamedDecoder | None = None
    repeats_text: bool = False

    def in_turn(self, number: int) -> list[NamedDecoder]:
        """Return all of them; the order alternates with `number`, so that none gains by it."""
        decoders = [*self.measured, *([] if self.baseline is None else [self.baseline])]
        return decoders if number % 2 == 0 else decoders[::-1]


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
    """Return the decoders. Decoders of the same checkpoint share one loaded model.

    Raises EvaluationError if a model cannot be loaded.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)

    def build(name: str, kind: str, model: PreTrainedModel, text: ModelText) -> NamedDecoder:
        heads = settings.medusa_heads if kind == "medusa_apar" else None
        decoder = load_decoder(
            kind, model, text.tokenizer, medusa_heads=heads, device=device, dtype=dtype
        )
        return NamedDecoder(name, kind, decoder, text)

    model = _model(settings, text, dtype, device)
    measured = tuple(build(kind, kind, model, text) for kind in settings.decoders)
    if settings.baseline is None or settings.baseline_name is None:
        return Decoders(measured)
    if settings.baseline_model is not None:
        model, text = (
            _checkpoint(settings.baseline_model, dtype, device),
            load_text(settings.baseline_model),
        )
    baseline = build(settings.baseline_name, settings.baseline, model, text)
    return Decoders(measured, baseline, settings.repeats_text)


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
    return _checkpoint(settings.model, dtype, device)


def _checkpoint(name_or_path: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EvaluationError(f"no model in {name_or_path!r}: {reason}") from error
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded
