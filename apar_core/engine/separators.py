"""The separators that the released checkpoints were trained to leave out, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from apar_core.engine.thread_outputs import TextToken
from apar_core.tree.restore import Edge, Separator

_LINE_BREAK = {Edge.FIRST_CHILD: "\n", Edge.NEXT_SIBLING: "\n\n"}


def separators(tokenizer: Any) -> Separator[TextToken]:
    """Put a line break before a detail and an empty line before the next paragraph.

    Nothing is added where the texts on either side already part them with white space.
    """

    @lru_cache(maxsize=65536)
    def text_of(token_id: int) -> str:
        # Behind a letter, so that a leading space of the token is not stripped.
        prefix: list[int] = tokenizer.encode("a", add_special_tokens=False)
        return str(tokenizer.decode([*prefix, token_id]))[len(str(tokenizer.decode(prefix))) :]

    breaks = {edge: _token_ids(tokenizer, text) for edge, text in _LINE_BREAK.items()}

    def separator(previous: TextToken, following: TextToken, edge: Edge) -> Sequence[TextToken]:
        before, after = text_of(previous.token_id), text_of(following.token_id)
        parted = before[-1:].isspace() or after[:1].isspace()
        return () if parted else [TextToken(token_id, None) for token_id in breaks[edge]]

    return separator


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    prefix: list[int] = tokenizer.encode("a", add_special_tokens=False)
    token_ids: list[int] = tokenizer.encode("a" + text, add_special_tokens=False)
    return token_ids[len(prefix) :]
