"""The formats that can be trained: their tokens, and how examples become rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from apar_core.offline.data.records import ExampleRecord
from apar_core.offline.data.sources import ItemRefusedError
from apar_core.offline.training.chat_format import ChatRefusedError, turn_end_id
from apar_core.offline.training.example_encoder import ExampleEncoder, PlainEncoder
from apar_core.offline.training.joined_encoder import MARKER_TOKENS, JoinedEncoder
from apar_core.offline.training.pretrained import (
    CONTROL_TOKENS,
    FormatTokens,
    load_tokenizer,
    with_tokens,
)


@dataclass(frozen=True, slots=True)
class TrainedFormat:
    """The part of a format that training needs.

    tokens: what the model gets, with their first rows. encoder: packs examples, given a tokenizer
    with these tokens and the context length.
    """

    tokens: FormatTokens
    encoder: type[ExampleEncoder]


TRAINED_FORMATS: Mapping[str, TrainedFormat] = MappingProxyType(
    {
        trained.tokens.name: trained
        for trained in (
            TrainedFormat(CONTROL_TOKENS, ExampleEncoder),
            TrainedFormat(MARKER_TOKENS, JoinedEncoder),
            # A baseline: the same answers as one thread.
            TrainedFormat(FormatTokens("flat", ((),)), PlainEncoder),
        )
    }
)
"""Formats by name."""


@dataclass(frozen=True, slots=True)
class ContextFit:
    """Fits prepared examples to `context_length` tokens of a model by dropping their oldest turns.

    `format_name` is the format that the model will be trained in. Each process loads its own
    tokenizer.
    """

    model_name: str
    context_length: int
    chat_template: Path | None = None
    format_name: str = CONTROL_TOKENS.name

    def check(self) -> None:
        """Raise TrainingError if the tokenizer cannot be loaded or cannot encode examples."""
        turn_end_id(_encoder(self).tokenizer)

    def __call__(self, example: ExampleRecord) -> ExampleRecord | None:
        """Return the fitted example, or None if its last question and answer are too long.

        Raises ItemRefusedError if the chat template rejects the chat.
        """
        try:
            return _encoder(self).fitted(example)
        except ChatRefusedError as error:
            raise ItemRefusedError("refused by the chat template", str(error)) from error


@cache
def _encoder(fit: ContextFit) -> ExampleEncoder:
    trained = TRAINED_FORMATS[fit.format_name]
    tokenizer = with_tokens(load_tokenizer(fit.model_name, fit.chat_template), trained.tokens)
    return trained.encoder(tokenizer, fit.context_length)
