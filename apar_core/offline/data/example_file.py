"""JSON lines files of examples, written by data preparation and read by training.

One line is `{"id", "kind", "messages": [{"role", "content"}, ...], "answer": THREAD}` where
the last message is the user's. A THREAD is a list of paragraphs `{"text", "detail"?}`, and
`detail` is the THREAD of the paragraph's first child.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from apar_core.errors import DataError, TreeError, validation_summary
from apar_core.offline.data.records import (
    ChatMessage,
    ExampleRecord,
    ParagraphRecord,
    thread_paragraphs,
)

STRUCTURED_FILE = "structured.jsonl"
UNSTRUCTURED_FILE = "unstructured.jsonl"


class _MessageLine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: str
    content: str


class _ParagraphLine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str
    detail: list[_ParagraphLine] | None = None


class _ExampleLine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str
    kind: str
    messages: list[_MessageLine] = Field(min_length=1)
    answer: list[_ParagraphLine]


def example_line(example: ExampleRecord) -> bytes:
    """Return the example as a line of the file, including the line break.

    Raises DataError if the id is missing, the last message is not the user's, or the text is not
    valid Unicode.
    """
    if example.example_id is None:
        raise DataError(f"an example of kind {example.kind!r} has no id")
    if not example.messages or example.messages[-1].role != "user":
        raise DataError(f"the last message of example {example.example_id!r} is not the user's")
    line = {
        "id": example.example_id,
        "kind": example.kind,
        "messages": [message.as_dict() for message in example.messages],
        "answer": _thread_lines(example.answer),
    }
    try:
        return json.dumps(line, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise DataError(
            f"example {example.example_id!r} contains a lone surrogate, which is not valid Unicode"
        ) from error


def read_examples(path: Path) -> Iterator[ExampleRecord]:
    """Yield the examples of a file, or of a folder written by data preparation.

    Structured examples of a folder come first. Raises DataError with the line number.
    """
    for file in example_files(path):
        yield from _read_file(file)


def example_files(path: Path) -> list[Path]:
    """Return the files that `read_examples` reads. Raises DataError if there are none."""
    if path.is_dir():
        files = [path / STRUCTURED_FILE, path / UNSTRUCTURED_FILE]
        found = [file for file in files if file.is_file()]
        if not found:
            raise DataError(f"{path} contains neither {STRUCTURED_FILE} nor {UNSTRUCTURED_FILE}")
        return found
    if path.is_file():
        return [path]
    raise DataError(f"{path} does not exist")


def example_of_line(line: bytes) -> ExampleRecord:
    """Parse a line written by `example_line`."""
    return _example(_ExampleLine.model_validate_json(line))


def _read_file(path: Path) -> Iterator[ExampleRecord]:
    # Bytes, because in JSON lines only a line feed ends a line.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield example_of_line(line)
                except (ValidationError, TreeError, DataError) as error:
                    if isinstance(error, ValidationError):
                        reason = validation_summary(error)
                    else:
                        reason = str(error)
                    raise DataError(f"{path}, line {number}: {reason}") from error


def _example(line: _ExampleLine) -> ExampleRecord:
    if line.messages[-1].role != "user":
        raise DataError(f"messages: the last role is {line.messages[-1].role!r}, not 'user'")
    return ExampleRecord(
        kind=line.kind,
        messages=tuple(ChatMessage(message.role, message.content) for message in line.messages),
        answer=_paragraphs(line.answer),
        example_id=line.id,
    )


def _paragraphs(thread: list[_ParagraphLine]) -> ParagraphRecord:
    following: ParagraphRecord | None = None
    for paragraph in reversed(thread):
        detail = None if paragraph.detail is None else _paragraphs(paragraph.detail)
        following = ParagraphRecord(paragraph.text, first_child=detail, next_sibling=following)
    if following is None:
        raise DataError("answer: a thread has no paragraphs")
    return following


def _thread_lines(first: ParagraphRecord) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for paragraph in thread_paragraphs(first):
        line: dict[str, Any] = {"text": paragraph.text}
        if paragraph.first_child is not None:
            line["detail"] = _thread_lines(paragraph.first_child)
        lines.append(line)
    return lines
