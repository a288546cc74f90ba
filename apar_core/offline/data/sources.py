"""Chats read from source files, item by item.

A file holds JSON lines, or one JSON array of any size. Items may be ShareGPT (`conversations` of
`from` and `value`), OpenAI (`messages` of `role` and `content`), or the mixtures of both that
published copies contain. FastChat answers (`question_id` with `choices` of `turns`, or with `text`)
need their question files. Traces have `prompt`, `response` and `history`. All of them may have a
system message in a field of its own (`system`, `system_prompt`). An assistant message of OpenAI's
form may have `weight: 0`: it is read by later answers, but not trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import takewhile
from pathlib import Path
from typing import Any

from apar_core.errors import DataError
from apar_core.offline.data.records import ChatMessage

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 20
# Of an array, where a missing bracket makes all that follows one element.
_MAX_ITEM_BYTES = 64 << 20

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

_SYSTEM_FIELDS = ("system", "system_prompt")

DAMAGED_ARRAY = "damaged array"
"""Reason of the refusal after which the rest of a file could not be read."""

ReadBytes = Callable[[int], None]
Questions = Mapping[str, tuple[str, ...]]


class ItemRefusedError(DataError):
    """An item cannot be used. `reason` is a category for the report; the message has details."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SourceItem:
    """One line or array element; `number` counts from 1.

    `text` is None if the array is damaged here; `failure` then says how, and no item follows.
    """

    source: str
    number: int
    unit: str
    text: bytes | None
    failure: str | None = None

    @property
    def place(self) -> str:
        """File and line or element number, for messages."""
        return f"{self.source}, {self.unit} {self.number}"


def source_files(inputs: Sequence[Path]) -> list[Path]:
    """Return the files, with folders replaced by their .json and .jsonl files.

    Raises DataError for a missing path and for a folder without such files.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found = sorted(file for file in path.iterdir() if file.suffix in (".json", ".jsonl"))
            if not found:
                raise DataError(f"folder {path} contains no .json or .jsonl file")
            files.extend(found)
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"{path} does not exist")
    # A file that is named twice, or that is also in a named folder, is read once.
    unique: dict[Path, Path] = {}
    for path in files:
        unique.setdefault(path.resolve(), path)
    return list(unique.values())


def read_items(path: Path, on_read: ReadBytes) -> Iterator[SourceItem]:
    """Yield the items of a file; `on_read` gets the number of bytes read since its last call.

    Raises DataError if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            # Peeking does not consume the start, so it also works for a pipe.
            start = file.peek().removeprefix(_BYTE_ORDER_MARK).lstrip()
            is_array = start.startswith(b"[")
            yield from (_array_items if is_array else _line_items)(path, file, on_read)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _line_items(path: Path, file: BufferedReader, on_read: ReadBytes) -> Iterator[SourceItem]:
    for number, line in enumerate(file, start=1):
        on_read(len(line))
        if line.strip():
            yield SourceItem(str(path), number, "line", line)


def _array_items(path: Path, file: BufferedReader, on_read: ReadBytes) -> Iterator[SourceItem]:
    def read(size: int) -> bytes:
        content = file.read(size)
        on_read(len(content))
        return content

    number = 0
    try:
        for number, element in enumerate(_elements(read), start=1):
            yield SourceItem(str(path), number, "item", element)
    except _DamagedArrayError as error:
        yield SourceItem(str(path), number + 1, "item", None, str(error))


class _DamagedArrayError(Exception):
    """The elements of an array cannot be told apart from here on."""


_ARRAY_MARK = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?P<string>")?|(?P<open>[\[{])|(?P<close>[\]}])|(?P<comma>,)',
    re.DOTALL,
)


def _elements(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield the JSON text of each element of an array, in time linear in the length of the file.

    Elements are separated by looking at strings and brackets only, so an element that is not valid
    JSON, or not UTF-8, does not affect the others. Raises _DamagedArrayError.
    """
    text = b""
    start = position = depth = 0
    has_ended = False
    # Reading at least as much again keeps the time linear for long elements.
    while chunk := read(max(_READ_BYTES, len(text) - start)):
        text = text[start:] + chunk
        start, position = 0, position - start
        for mark in _ARRAY_MARK.finditer(text, position):
            position = mark.start()
            kind = mark.lastgroup
            if has_ended:
                raise _DamagedArrayError("the file goes on after the end of the array")
            if kind is None:
                # The string continues in the next chunk.
                break
            if kind == "open":
                depth += 1
                if depth == 1:
                    start = mark.end()
            elif kind == "close":
                depth -= 1
                has_ended = depth == 0
            if has_ended or (kind == "comma" and depth == 1):
                element = text[start : mark.start()]
                if kind == "comma" or element.strip():
                    yield element
                start = mark.end()
        else:
            position = len(text)
        if len(text) - start > _MAX_ITEM_BYTES:
            raise _DamagedArrayError(f"an element has more than {_MAX_ITEM_BYTES >> 20} MiB")
    if has_ended:
        if text[start:].strip():
            raise _DamagedArrayError("the file goes on after the end of the array")
        return
    if depth == 1 and text[start:].strip():
        yield text[start:]
    raise _DamagedArrayError("the file ends before the array does")


def parse_item(line: bytes) -> Any:
    """Return the JSON value of a line or element. Raises ItemRefusedError."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ItemRefusedError("not UTF-8", f"byte {error.start}") from error
    except RecursionError as error:
        raise ItemRefusedError("broken JSON", "nested too deeply") from error
    except ValueError as error:
        raise ItemRefusedError("broken JSON", str(error)) from error


def chat_of_item(item: Any, questions: Questions) -> list[ChatMessage]:
    """Return the messages of an item: optionally a system message, then alternating roles.

    Chats that were shared in parts may start with assistant messages. Raises ItemRefusedError.
    """
    if not isinstance(item, dict):
        raise ItemRefusedError("wrong type", f"expected an object, got {type(item).__name__}")
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
    for field in _SYSTEM_FIELDS:
        _add_system(messages, item, field)
    _check_order(messages)
    return messages


def num_leading_answers(turns: Sequence[ChatMessage]) -> int:
    """Return the number of answers before the first question."""
    return sum(1 for _ in takewhile(lambda message: message.role == "assistant", turns))


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
                    raise TypeError("turns is not a list")
                questions[str(item["question_id"])] = tuple(turns)
            except ItemRefusedError as error:
                raise DataError(f"{path}, line {number}: {error}") from error
            except (KeyError, TypeError) as error:
                raise DataError(
                    f"{path}, line {number}: a question needs a question_id and a list of turns"
                ) from error
    return questions


def _turns(turns: Any, field: str) -> list[ChatMessage]:
    if not isinstance(turns, list):
        raise ItemRefusedError("wrong type", f"{field} is {type(turns).__name__}, not a list")
    messages: list[ChatMessage] = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise ItemRefusedError("wrong type", f"{field}[{number}] is not an object")
        role_field, text_field = ("from", "value") if "from" in turn else ("role", "content")
        role = _ROLES.get(str(turn.get(role_field)).lower())
        if role is None:
            raise ItemRefusedError(
                "unknown role", f"{field}[{number}].{role_field} = {turn.get(role_field)!r:.40}"
            )
        # Null in files of a library whose rows all have the same fields.
        weight = 1 if turn.get("weight") is None else turn["weight"]
        if weight not in (0, 1):
            raise ItemRefusedError(
                "unknown weight", f"{field}[{number}].weight = {weight!r:.40}; use 0 or 1"
            )
        messages.append(ChatMessage(role, _text(turn, text_field), is_trained=weight == 1))
    return messages


def _add_system(messages: list[ChatMessage], item: Mapping[str, Any], field: str) -> None:
    """Put the system message of a field of the item before the turns."""
    if item.get(field) in (None, ""):
        return
    system = ChatMessage("system", _text(item, field))
    if not messages or messages[0].role != "system":
        messages.insert(0, system)
    elif messages[0].content != system.content:
        raise ItemRefusedError("two system messages", f"{field} and the first turn differ")


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
        raise ItemRefusedError("no Unicode text", f"{field} contains a lone surrogate") from error
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
            "no question", f"no question file contains question_id {item['question_id']!r:.40}"
        )
    if not isinstance(answers, list) or not answers:
        raise ItemRefusedError("wrong type", "choices[0].turns is not a list of texts")
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
            raise ItemRefusedError(
                "roles out of order", f"turn {place} has role {message.role}, not {expected}"
            )
