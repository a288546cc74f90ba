"""Fits examples to the context of the model that they train, while data is prepared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from apar_core.data.records import ExampleRecord
from apar_core.training.example_encoder import ExampleEncoder
from apar_core.training.pretrained import load_tokenizer
from apar_core.training.vocabulary import tree_tokens, with_control_tokens


@dataclass(frozen=True, slots=True)
class ContextFit:
    """Drops the oldest turns of an example until it fits `context_length` tokens of a model.

    Each process loads the tokenizer for itself.
    """

    model_name: str
    context_length: int

    def check(self) -> None:
        """Load the tokenizer. Raises TrainingError if it cannot encode examples."""
        tree_tokens(_encoder(self.model_name, self.context_length).tokenizer)

    def __call__(self, example: ExampleRecord) -> ExampleRecord | None:
        """Return the fitted example, or None if its last question and answer are too long."""
        return _encoder(self.model_name, self.context_length).fitted(example)


@cache
def _encoder(model_name: str, context_length: int) -> ExampleEncoder:
    tokenizer = load_tokenizer(model_name)
    with_control_tokens(tokenizer)
    return ExampleEncoder(tokenizer, context_length)
