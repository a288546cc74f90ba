"""The thought that a reasoning model writes before its answer.

A thought is the unforked beginning of the root thread: it is kept verbatim, and only the answer
behind it is divided into threads.
"""

from __future__ import annotations

import re
from typing import NamedTuple

THOUGHT_OPENING = "<think>"
THOUGHT_CLOSING = "</think>"

_OPENED = re.compile(r"\s*<think>.*?(?:</think>\s*|\Z)", re.DOTALL)
# Servers whose prompt opens the thought return the rest of it. The marker ends a line: prose that
# only mentions it mostly goes on behind it.
_CLOSING_LINE = re.compile(r"</think>[ \t]*(?:[\r\n]\s*|\Z)")


class ThoughtAndAnswer(NamedTuple):
    """An answer in two parts whose concatenation is the whole text.

    `thought` has its markers and the blanks behind it. It is empty without a thought. The opening
    marker is missing where the prompt held it. An unfinished thought leaves `answer` empty.
    """

    thought: str
    answer: str


def split_thought(text: str) -> ThoughtAndAnswer:
    """Divide a generated text into its thought and its answer."""
    opened = _OPENED.match(text)
    if opened is not None:
        return ThoughtAndAnswer(text[: opened.end()], text[opened.end() :])
    closing = _CLOSING_LINE.search(text)
    if closing is not None and THOUGHT_OPENING not in text[: closing.start()]:
        return ThoughtAndAnswer(text[: closing.end()], text[closing.end() :])
    return ThoughtAndAnswer("", text)


def is_empty_thought(thought: str) -> bool:
    """Tell whether nothing but blanks stands between the markers, or there is no thought."""
    inside = thought.strip().removeprefix(THOUGHT_OPENING).removesuffix(THOUGHT_CLOSING)
    return not inside.strip()
