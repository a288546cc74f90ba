"""One item of a source file as a chat, in any of the forms that are understood.

ShareGPT (`conversations` of `from` and `value`), OpenAI (`messages` of `role` and `content`);
published copies mix the two. FastChat's answers (`question_id` with `choices` of `turns`, or with
`text`), which need the questions, and traces (`prompt`, `response`, `history`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from apar_core.errors import DataError
from apar_core.offline.data.records import ChatMessage

Questions = Mapping[str, tuple[str, ...]]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
}


class ItemRefusedError(DataError):
    """An item cannot be used; `reason` is one of few, the message tells more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def parse_item(line: bytes) -> Any:
    """Return the JSON value of a line. Raises ItemRefusedError."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ItemRefusedError("not UTF-8", f"byte {error.start}") from error
    except RecursionError as error:
        raise ItemRefusedError("broken JSON", "nested too deeply") from error
    except ValueError as error:
        raise ItemRefusedError("broken JSON", str(error)) from error


def chat_of_item(item: Any, questions: Questions) -> list[ChatMessage]:
    """Return the turns of an item: an optional system message, then user and assistant in turn.

    Before the first user's turn there may be answers to nothing, as where a chat was shared in
    parts. Raises ItemRefusedError.
    """
    if not isinstance(item, dict):
        raise ItemRefusedError("wrong type", f"an object was expected, not {type(item).__name__}")
    if "conversations" in item:
        messages = _turns(item["conversations"], "conversations")
    elif "messages" in item:
        messages = _turns(item["messages"], "messages")
    elif "response" in item:
        history = _turns(item.get("history") or [], "history")
        messages = [*history, ChatMessage("user", _text(item, "prompt"))]
        messages.append(ChatMessage("assistant", _text(item, "response")))
    elif "question_id" in item:
        messages = _answered_questions(item, questions)
    else:
        raise ItemRefusedError(
            "missing field", "none of conversations, messages, response, question_id"
        )
    _check_order(messages)
    return messages


def load_questions(paths: Sequence[Path]) -> dict[str, tuple[str, ...]]:
    """Return the turns of FastChat question files by question id. Raises DataError."""
    questions: dict[str, tuple[str, ...]] = {}
    for path in paths:
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                item = parse_item(line)
                turns = item["turns"]
                if not isinstance(turns, list):
                    raise TypeError("turns is no list")
                questions[str(item["question_id"])] = tuple(turns)
            except ItemRefusedError as error:
                raise DataError(f"{path}, line {number}: {error}") from error
            except (KeyError, TypeError) as error:
                raise DataError(
                    f"{path}, line {number}: a question has question_id and a list of turns"
                ) from error
    return questions


def _turns(turns: Any, field: str) -> list[ChatMessage]:
    if not isinstance(turns, list):
        raise ItemRefusedError("wrong type", f"{field} is {type(turns).__name__}, not a list")
    messages: list[ChatMessage] = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise ItemRefusedError("wrong type", f"{field}[{number}] is no object")
        role_field, text_field = ("from", "value") if "from" in turn else ("role", "content")
        role = _ROLES.get(str(turn.get(role_field)).lower())
        if role is None:
            raise ItemRefusedError(
                "unknown role", f"{field}[{number}].{role_field} = {turn.get(role_field)!r:.40}"
            )
        messages.append(ChatMessage(role, _text(turn, text_field)))
    return messages


def _text(item: Mapping[str, Any], field: str) -> str:
    if item.get(field) is None:
        raise ItemRefusedError("missing field", field)
    text = item[field]
    if isinstance(text, list) and text and all(_is_text_part(part) for part in text):
        text = "".join(part["text"] for part in text)
    if not isinstance(text, str):
        raise ItemRefusedError("wrong type", f"{field} is {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ItemRefusedError("no Unicode text", f"{field} holds a lone surrogate") from error
    return text


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _answered_questions(item: Mapping[str, Any], questions: Questions) -> list[ChatMessage]:
    if "choices" in item:
        try:
            answers = item["choices"][0]["turns"]
        except (IndexError, KeyError, TypeError) as error:
            raise ItemRefusedError("missing field", "choices[0].turns") from error
    else:
        answers = [_text(item, "text")]
    asked = questions.get(str(item["question_id"]))
    if asked is None:
        raise ItemRefusedError(
            "no question", f"none of the question files has question_id {item['question_id']!r:.40}"
        )
    if not isinstance(answers, list) or not answers:
        raise ItemRefusedError("wrong type", "choices[0].turns is no list of texts")
    if len(answers) > len(asked):
        raise ItemRefusedError("no question", f"{len(answers)} answers to {len(asked)} turns")
    messages: list[ChatMessage] = []
    for question, answer in zip(asked, answers, strict=False):
        messages.append(ChatMessage("user", _text({"turns": question}, "turns")))
        messages.append(ChatMessage("assistant", _text({"turns": answer}, "turns")))
    return messages


def _check_order(messages: Sequence[ChatMessage]) -> None:
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    if not any(message.role == "assistant" for message in turns):
        raise ItemRefusedError("no answer")
    num_leading = num_leading_answers(turns)
    for number, message in enumerate(turns[num_leading:]):
        expected = "assistant" if number % 2 else "user"
        if message.role != expected:
            place = num_leading + number + 1
            raise ItemRefusedError("roles out of order", f"turn {place} is the {message.role}'s")


def num_leading_answers(turns: Sequence[ChatMessage]) -> int:
    """Return how many answers stand before the first question."""
    return sum(1 for _ in takewhile(lambda message: message.role == "assistant", turns))
