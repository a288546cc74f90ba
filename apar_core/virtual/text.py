"""Realistic token counts in the small vocabulary of virtual engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from apar_core.errors import EvaluationError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.virtual.engine import VOCABULARY_SIZE

if TYPE_CHECKING:
    from apar_core.formats.control_tokens import TreeTokens
    from apar_core.offline.data.records import ChatMessage
    from apar_core.offline.evaluation.replay_text import ModelText

_NUM_SPECIAL_IDS = 8


class FoldedText:
    """The token counts of one tokenizer in the vocabulary and control tokens of another.

    An id of the large vocabulary becomes an ordinary id of the small one: virtual engines only
    count tokens.
    """

    def __init__(self, large: ModelText, small: ModelText) -> None:
        """Raise EvaluationError if the small tokenizer does not fit into the vocabulary."""
        if small.vocabulary_size > VOCABULARY_SIZE:
            raise EvaluationError(
                f"the tokenizer has {small.vocabulary_size} entries, the model {VOCABULARY_SIZE}"
            )
        self._large = large
        self.tokens: TreeTokens = small.tokens
        self.vocabulary_size = VOCABULARY_SIZE

    def encode(self, text: str) -> list[int]:
        """Return the ids of a piece of an answer."""
        return _folded(self._large.encode(text))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the ids of a chat up to the start of its answer."""
        return _folded(self._large.encode_chat(messages))


def virtual_text(tokenizer: str | None = None) -> FoldedText:
    """Return the text of virtual engines with the token counts of a tokenizer.

    By default that is Llama's (`replay_text.LLAMA_TOKENIZER`). Raises EvaluationError if it cannot
    be loaded.
    """
    # Imports transformers, which takes seconds.
    from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, load_text

    return FoldedText(load_text(tokenizer or LLAMA_TOKENIZER), load_text(str(checkpoint_path())))


def _folded(token_ids: Sequence[int]) -> list[int]:
    num_ordinary = VOCABULARY_SIZE - _NUM_SPECIAL_IDS
    return [_NUM_SPECIAL_IDS + token_id % num_ordinary for token_id in token_ids]
