"""Lines of a batch's input: read piece by piece, checked, and turned into requests and results."""

import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from apar_core.errors import RequestError
from deployments.gateway.batches.records import InputProblem, Result
from deployments.gateway.body import parse_fields

_MAX_SHOWN_CHARS = 500
_LINE_SEPARATORS = "\x85\u2028\u2029"
MAX_CUSTOM_ID_CHARS = 512
_ENVELOPE_BYTES = 4096
MAX_PROBLEMS = 20
"""Problems of an input that are reported; the rest of the file is then not read."""
_DIGEST_BYTES = 12
_FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not empty; `number` counts all lines from 1. None: it is too long."""

    number: int
    text: bytes | None


class InputMissingError(Exception):
    """The input file of a batch does not exist."""


async def lines_of(
    chunk_of: Callable[[str, int], Awaitable[bytes | None]], file_id: str, max_bytes: int
) -> AsyncIterator[Line]:
    """Yield the lines of a file, holding one chunk and one line of at most `max_bytes`.

    `chunk_of` reads a chunk of a file, as `BatchStore.chunk` does. Raises InputMissingError.
    """
    chunk_number = number = 0
    rest = b""
    is_too_long = False
    while (chunk := await chunk_of(file_id, chunk_number)) is not None:
        pieces = chunk.split(b"\n")
        pieces[0] = rest + pieces[0]
        rest = pieces.pop()
        for piece in pieces:
            number += 1
            if line := _line(number, piece, max_bytes, is_too_long=is_too_long):
                yield line
            is_too_long = False
        if len(rest) > max_bytes:
            rest, is_too_long = b"", True
        chunk_number += 1
    if not chunk_number:
        raise InputMissingError(f"the file {file_id} does not exist")
    if line := _line(number + 1, rest, max_bytes, is_too_long=is_too_long):
        yield line


def _line(number: int, text: bytes, max_bytes: int, *, is_too_long: bool) -> Line | None:
    if is_too_long or len(text) > max_bytes:
        return Line(number, None)
    if number == 1:
        text = text.removeprefix(b"\xef\xbb\xbf")
    text = text.strip()
    return Line(number, text) if text else None


def max_line_bytes(max_body_bytes: int) -> int:
    """Return the limit on a line whose request has a limit of its own."""
    return max_body_bytes + _ENVELOPE_BYTES


@dataclass(frozen=True, slots=True)
class LineRequest:
    """The request that a line holds: its `custom_id`, and its body as JSON."""

    custom_id: str
    body: bytes


def request_of(text: bytes) -> LineRequest:
    """Return the request of a line that `LineChecker` has accepted.

    Spaces and escapes would make the body longer than the limit that the line was compared with.
    """
    fields = json.loads(text.decode("utf-8", "surrogatepass"))
    body = partial(json.dumps, fields["body"], separators=(",", ":"))
    try:
        return LineRequest(fields["custom_id"], body(ensure_ascii=False).encode())
    except UnicodeEncodeError:
        # A lone surrogate, which the line escapes.
        return LineRequest(fields["custom_id"], body().encode())


class LineChecker:
    """Checks the lines of one input, in order.

    Keeps a digest of each `custom_id`, about 100 bytes a line, to find duplicates.
    """

    def __init__(
        self,
        endpoint: str,
        max_lines: int,
        max_bytes: int,
        check_model: Callable[[object], None],
    ) -> None:
        """`check_model` raises RequestError for a model that the key may not use."""
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._check_model = check_model
        self._seen: dict[bytes, int] = {}
        self.problems: list[InputProblem] = []
        self.num_lines = self.last_line = 0

    @property
    def is_full(self) -> bool:
        """Whether enough problems are known."""
        return len(self.problems) >= MAX_PROBLEMS

    def check(self, line: Line) -> None:
        """Add a line, or the problem that it has."""
        self.num_lines += 1
        self.last_line = line.number
        if self.num_lines == self._max_lines + 1:
            message = (
                f"The file has more than {self._max_lines} requests, the limit "
                "`batches.max_lines`; split it into several batches."
            )
            self._refuse(line.number, "too_many_requests", message)
        if not self.is_full and self.num_lines <= self._max_lines:
            try:
                self._check(line)
            except _LineError as error:
                self._refuse(line.number, error.code, str(error), error.param)

    def end(self) -> None:
        """Note the end of the file."""
        if not self.num_lines:
            message = "The file has no requests: one JSON object per line is expected."
            self.problems.append(InputProblem(code="empty_file", message=message))

    def _refuse(self, number: int, code: str, message: str, param: str | None = None) -> None:
        self.problems.append(
            InputProblem(
                code=code,
                message=_shown(message),
                line=number,
                param=None if param is None else _shown(param),
            )
        )

    def _check(self, line: Line) -> None:
        if line.text is None:
            raise _LineError("line_too_long", f"The line is longer than {self._max_bytes} bytes.")
        try:
            fields = parse_fields(line.text)
        except RequestError as error:
            message = str(error).replace("The body", "The line")
            raise _LineError("invalid_json_line", message) from None
        self._check_custom_id(fields, line.number)
        for name, expected in (("method", "POST"), ("url", self._endpoint)):
            if name not in fields:
                raise _LineError("missing_required_parameter", f"`{name}` is missing", name)
            if fields[name] != expected:
                given = str(fields[name])[:80]
                message = f"`{name}` must be {expected} in this batch, got {given!r}"
                raise _LineError(f"invalid_{name}", message, name)
        for name in fields:
            if name not in _FIELDS:
                known = ", ".join(sorted(_FIELDS))
                message = f"Unknown field `{name[:80]}`; a line has {known}"
                raise _LineError("unknown_parameter", message, name[:80])
        body = fields.get("body")
        if not isinstance(body, dict):
            raise _LineError("missing_required_parameter", "`body` must be a JSON object", "body")
        if body.get("stream"):
            message = "`stream` must be false or absent: a batch keeps whole answers"
            raise _LineError("invalid_parameter", message, "body.stream")
        try:
            self._check_model(body.get("model"))
        except RequestError as error:
            code = error.code or "invalid_parameter"
            raise _LineError(code, str(error), "body.model") from None

    def _check_custom_id(self, fields: dict[str, Any], number: int) -> None:
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            message = f"`custom_id` must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters"
            raise _LineError("missing_required_parameter", message, "custom_id")
        digest = hashlib.blake2b(
            custom_id.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES
        ).digest()
        first = self._seen.setdefault(digest, number)
        if first != number:
            message = f"`custom_id` is that of line {first}: {custom_id[:80]!r}"
            raise _LineError("duplicate_custom_id", message, "custom_id")


def _shown(text: str) -> str:
    """Return text of a client as it may be stored: valid Unicode, and not too long."""
    return text[:_MAX_SHOWN_CHARS].encode("utf-8", "replace").decode()


class _LineError(Exception):
    """A line is invalid."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def request_id_of(batch_id: str, line: int) -> str:
    """Return the id of a line's request, in results and in the request log."""
    return f"batch_req_{batch_id.removeprefix('batch_')}-{line}"


def answered_result(batch_id: str, line: int, custom_id: str, status: int, body: bytes) -> Result:
    """Return the result of a line that got an answer; an error is one from status 400 on."""
    request_id = request_id_of(batch_id, line)
    head = {"id": request_id, "custom_id": custom_id}
    response = {"status_code": status, "request_id": request_id}
    # The body is JSON already and may be large. Outside of strings a line break is a space.
    record = (
        json.dumps(head)[:-1].encode()
        + b', "response": '
        + json.dumps(response)[:-1].encode()
        + b', "body": '
        + _in_one_line(body)
        + b'}, "error": null}\n'
    )
    return Result(line, status >= HTTPStatus.BAD_REQUEST, record)


def _in_one_line(body: bytes) -> bytes:
    """Return JSON without characters at which programs split a text into lines."""
    body = body.replace(b"\n", b" ")
    for separator in _LINE_SEPARATORS:
        body = body.replace(separator.encode(), f"\\u{ord(separator):04x}".encode())
    return body


def unanswered_result(batch_id: str, line: int, custom_id: str, code: str, message: str) -> Result:
    """Return the result of a line that was not run."""
    record = {
        "id": request_id_of(batch_id, line),
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return Result(line, True, json.dumps(record).encode() + b"\n")
