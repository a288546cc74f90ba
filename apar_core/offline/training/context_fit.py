"""Fits examples to the context of the model that they train, while data is prepared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from apar_core.offline.data.records import ExampleRecord
from apar_core.offline.data.sources import ItemRefusedError
from apar_core.offline.training.chat_format import ChatRefusedError
from apar_core.offline.training.example_encoder import ExampleEncoder
from apar_core.offline.training.pretrained import load_tokenizer
from apar_core.offline.training.vocabulary import tree_tokens, with_control_tokens


@dataclass(frozen=True, slots=True)
class ContextFit:
    """Drops the oldest turns of an example until it fits `context_length` tokens of a model.

    Each process loads the tokenizer for itself.
    """

    model_name: str
    context_length: int
    chat_template: Path | None = None

    def check(self) -> None:
        """Load the tokenizer. Raises TrainingError if it cannot encode examples."""
        tree_tokens(_encoder(self).tokenizer)

    def __call__(self, example: ExampleRecord) -> ExampleRecord | None:
        """Return the fitted example, or None if its last question and answer are too long.

        Raises ItemRefusedError if the chat template refuses the chat.
        """
        try:
            return _encoder(self).fitted(example)
        except ChatRefusedError as error:
            raise ItemRefusedError("refused by the chat template", str(error)) from error


@cache
def _encoder(fit: ContextFit) -> ExampleEncoder:
    tokenizer = load_tokenizer(fit.model_name, fit.chat_template)
    with_control_tokens(tokenizer)
    return ExampleEncoder(tokenizer, fit.context_length)
