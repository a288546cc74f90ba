"""Questions from a file, in any format that evaluations or data preparation read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from apar_core.errors import DataError
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.data.sources import (
    ItemRefusedError,
    chat_of_item,
    num_leading_answers,
    parse_item,
    read_items,
)
from apar_core.offline.evaluation.prompt_sets import QuestionLine

Prompt = tuple[ChatMessage, ...]
"""A chat up to the user's message that is to be answered."""


def read_prompts(path: Path) -> list[Prompt]:
    """Return the questions of a file, in order.

    A recorded chat gives its first question, with its system message: later ones depend on answers
    of another model. A .txt file has one question per line. Raises DataError for an item without
    a question, and for a file without items.
    """
    prompts: list[Prompt] = []
    if path.suffix == ".txt":
        prompts += [(ChatMessage("user", line),) for line in read_text_lines(path)]
    else:
        for item in read_items(path, lambda _num_bytes: None):
            if item.text is None:
                raise DataError(f"{item.place}: damaged array: {item.failure}")
            try:
                prompts.append(_prompt_of_item(parse_item(item.text)))
            except ItemRefusedError as error:
                raise DataError(f"{item.place}: {error}") from error
    if not prompts:
        raise DataError(f"{path} contains no questions")
    return prompts


def read_text_lines(path: Path) -> list[str]:
    """Return the lines of a text file that are not blank. Raises DataError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason}") from error
    return [line.strip() for line in text.split("\n") if line.strip()]


def _prompt_of_item(item: Any) -> Prompt:
    try:
        messages = chat_of_item(item, {})
    except ItemRefusedError as refusal:
        # A question without an answer.
        try:
            return QuestionLine.model_validate(item).question("").messages(0, ())
        except ValidationError:
            raise refusal from None
    num_system = messages[0].role == "system"
    question = num_system + num_leading_answers(messages[num_system:])
    if question == len(messages):
        raise ItemRefusedError("no question", "only answers")
    if not messages[question].content.strip():
        raise ItemRefusedError("empty question")
    return (*messages[:num_system], messages[question])
