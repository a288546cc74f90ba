"""Files of chats, read item by item: JSON lines, or one JSON array of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import ijson  # type: ignore[import-untyped]

from apar_core.errors import DataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Chats nest five deep; what nests without end would fill the memory.
_MAX_DEPTH = 100

ReadBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class SourceItem:
    """One line or array element; `number` counts from 1.

    `value` is a line as bytes, or a parsed element, or None with the `failure` that ended an array.
    """

    source: str
    number: int
    unit: str
    value: Any
    failure: str | None = None

    @property
    def place(self) -> str:
        """Where the item stands, for messages."""
        return f"{self.source}, {self.unit} {self.number}"


class _CountingFile:
    """A file that tells how many bytes have been read of it."""

    def __init__(self, file: IO[bytes], on_read: ReadBytes) -> None:
        self._file = file
        self._on_read = on_read

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self._on_read(len(content))
        return content


def source_files(inputs: Sequence[Path]) -> list[Path]:
    """Return the files, with folders replaced by the .json and .jsonl files in them.

    Raises DataError for what does not exist and for a folder without such files.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found = sorted(file for file in path.iterdir() if file.suffix in (".json", ".jsonl"))
            if not found:
                raise DataError(f"folder {path} holds no .json or .jsonl file")
            files.extend(found)
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"{path} does not exist")
    # A file that is named twice, or lies in a named folder too, is read once.
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
            # Peeking leaves the start in place, in a pipe too.
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
    if file.peek().startswith(_BYTE_ORDER_MARK):
        on_read(len(file.read(len(_BYTE_ORDER_MARK))))
    number = 0
    try:
        elements = _elements(_CountingFile(file, on_read))
        for number, value in enumerate(elements, start=1):
            yield SourceItem(str(path), number, "item", value)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        # Nothing behind the mistake can be told apart any more.
        reason = _first_line(error)
        yield SourceItem(
            str(path), number + 1, "item", None, f"{reason}; the rest of the file is lost"
        )


def _elements(file: _CountingFile) -> Iterator[Any]:
    """Yield the elements of an array. Raises ijson.JSONError, also for one nested too deeply."""
    depth = 0
    builder = ijson.ObjectBuilder()
    for event, value in ijson.basic_parse(file, use_float=True):
        if depth == 1:
            builder = ijson.ObjectBuilder()
        is_outermost = depth == 0
        if event in ("start_map", "start_array"):
            depth += 1
            if depth > _MAX_DEPTH:
                raise ijson.JSONError("nested too deeply")
        elif event in ("end_map", "end_array"):
            depth -= 1
        if depth > 0 and not is_outermost:
            builder.event(event, value)
            if depth == 1:
                yield builder.value


def _first_line(error: Exception) -> str:
    # The parser's own messages are bytes, with the place in the lines below.
    message = error.args[0] if error.args else ""
    text = message.decode(errors="replace") if isinstance(message, bytes) else str(error)
    return text.strip().split("\n")[0]
