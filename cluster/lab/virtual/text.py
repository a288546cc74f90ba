"""Realistic token counts in the small vocabulary of virtual engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from apar_core.errors import EngineError
from apar_core.formats.control_tokens import TreeTokens, find_control_tokens
from apar_core.models.apar_tiny import checkpoint_path

if TYPE_CHECKING:
    from apar_core.offline.data.records import ChatMessage
    from apar_core.offline.evaluation.replay_text import ModelText

VOCABULARY_SIZE = 4096
TEXT_IDS = range(8, VOCABULARY_SIZE)
"""The ids of ordinary tokens; those below are special."""


class FoldedText:
    """Encoder with a tokenizer's token counts, and the vocabulary of virtual engines.

    Each id of the large vocabulary is mapped to an ordinary id of the small one, because virtual
    engines only count tokens. `tokens` are the control and end tokens.
    """

    def __init__(self, large: ModelText) -> None:
        self._large = large
        self.tokens = checkpoint_tokens()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a piece of an answer."""
        return folded_ids(self._large.encode(text))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the ids of a chat up to the start of its answer."""
        return folded_ids(self._large.encode_chat(messages))


def virtual_text(tokenizer: str | None = None) -> FoldedText:
    """Return an encoder for virtual engines with the token counts of a tokenizer.

    The default is Llama's (`replay_text.LLAMA_TOKENIZER`). Raises EvaluationError if it cannot be
    loaded.
    """
    # Imports transformers, which takes seconds.
    from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, load_text

    return FoldedText(load_text(tokenizer or LLAMA_TOKENIZER))


def folded_ids(token_ids: Sequence[int], *, offset: int = 0) -> list[int]:
    """Map ids to ordinary ids of the small vocabulary; different offsets give different ids."""
    return [TEXT_IDS[(token_id + offset) % len(TEXT_IDS)] for token_id in token_ids]


@cache
def checkpoint_tokens() -> TreeTokens:
    """Return the control and end tokens of the small vocabulary that virtual engines use."""
    folder = checkpoint_path()
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = dict(tokenizer["model"]["vocab"])
    vocabulary.update({each["content"]: each["id"] for each in tokenizer["added_tokens"]})
    control_tokens = find_control_tokens(vocabulary)
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    if control_tokens is None:
        raise EngineError(f"{folder} has no control tokens")
    return TreeTokens(
        control_tokens.fork_id, control_tokens.child_id, int(generation["eos_token_id"])
    )
