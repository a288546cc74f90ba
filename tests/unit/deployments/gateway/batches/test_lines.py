"""Lines of an input: reading them piece by piece, and what is wrong with them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar_core.errors import RequestError
from deployments.gateway.batches.lines import (
    Line,
    LineChecker,
    answered_result,
    lines_of,
    request_of,
    unanswered_result,
)
from tests.fakes.batch_records import CHAT, jsonl, line_of


class Chunks:
    """A store with one file in chunks of a given size."""

    def __init__(self, data: bytes, size: int) -> None:
        self._chunks = [data[at : at + size] for at in range(0, len(data), size)] or [b""]

    async def chunk(self, file_id: str, number: int) -> bytes | None:
        return self._chunks[number] if number < len(self._chunks) else None


async def read(data: bytes, size: int, max_bytes: int = 1000) -> list[Line]:
    chunks = Chunks(data, size)
    return [line async for line in lines_of(chunks.chunk, "file-1", max_bytes)]


@given(
    data=st.binary(max_size=60).map(lambda data: data.replace(b"x", b"\n")), size=st.integers(1, 9)
)
async def test_lines_do_not_depend_on_the_chunks(data: bytes, size: int) -> None:
    expected = [
        Line(number, text if len(text) <= 5 else None)
        for number, text in enumerate(data.split(b"\n"), 1)
    ]

    found = await read(data, size, max_bytes=5)

    # Blank lines count, but are not returned.
    stripped = [
        Line(line.number, None if line.text is None else line.text.strip()) for line in expected
    ]
    assert found == [line for line in stripped if line.text != b""]


async def test_a_mark_at_the_beginning_and_ends_of_lines_as_on_windows_are_left_out() -> None:
    assert await read(b"\xef\xbb\xbf{1}\r\n\r\n {2} ", 4) == [Line(1, b"{1}"), Line(3, b"{2}")]


def check_model(name: object) -> None:
    if name != "m":
        raise RequestError(f"no such model: {name}", param="model")


def checker(max_lines: int = 10) -> LineChecker:
    return LineChecker(CHAT, max_lines, 1000, check_model)


def checked(*lines: Any, max_lines: int = 10) -> LineChecker:
    found = checker(max_lines)
    for number, line in enumerate(lines, 1):
        text = json.dumps(line).encode() if isinstance(line, dict | list | str) else line
        found.check(Line(number, text))
    found.end()
    return found


def test_a_valid_input_has_no_problems() -> None:
    found = checked(line_of("1"), line_of("2"), line_of("é \ud83d"))

    assert (found.problems, found.num_lines, found.last_line) == ([], 3, 3)


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        ([], "invalid_json_line", None),
        (b'{"custom_id": ' + b"9" * 50 + b"}", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (None, "line_too_long", None),
        (line_of("1") | {"custom_id": 7}, "missing_required_parameter", "custom_id"),
        (line_of("1") | {"custom_id": ""}, "missing_required_parameter", "custom_id"),
        (line_of("x" * 513), "missing_required_parameter", "custom_id"),
        (line_of("0"), "duplicate_custom_id", "custom_id"),
        (line_of("1", method="GET"), "invalid_method", "method"),
        (line_of("1", url="/v1/embeddings"), "invalid_url", "url"),
        ({"custom_id": "1", "method": "POST"}, "missing_required_parameter", "url"),
        (line_of("1", priority=1), "unknown_parameter", "priority"),
        (line_of("1", body=None), "missing_required_parameter", "body"),
        (line_of("1", body={"model": "m", "stream": True}), "invalid_parameter", "body.stream"),
        (line_of("1", body={"model": "other"}), "invalid_parameter", "body.model"),
        (line_of("1", body={}), "invalid_parameter", "body.model"),
    ],
)
def test_a_problem_names_line_and_field(line: Any, code: str, param: str | None) -> None:
    [problem] = checked(line_of("0"), line, line_of("2")).problems

    assert (problem.code, problem.line, problem.param) == (code, 2, param)


def test_what_a_problem_quotes_can_be_stored_and_is_short() -> None:
    [first, second] = checked(
        {**line_of("1"), "x\ud800": 1}, line_of("2", body={"model": "m" * 10_000})
    ).problems

    assert json.loads(first.model_dump_json())["param"] == "x?"
    assert len(second.message) <= 500


def test_an_empty_file_and_one_with_too_many_lines_are_refused() -> None:
    [empty] = checked().problems
    [long] = checked(*(line_of(str(number)) for number in range(5)), max_lines=3).problems

    assert (empty.code, empty.line) == ("empty_file", None)
    assert (long.code, long.line) == ("too_many_requests", 4)
    assert checked(*(line_of(str(number)) for number in range(3)), max_lines=3).problems == []


def test_not_more_than_twenty_problems_are_reported() -> None:
    found = checked(*[b"{"] * 500, max_lines=1000)

    assert [problem.line for problem in found.problems] == list(range(1, 21))
    assert found.is_full


@given(st.binary(max_size=200))
def test_any_bytes_are_a_line_or_a_problem(data: bytes) -> None:
    found = checked(data)

    assert len(found.problems) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=20),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each, max_size=3)
    ),
    max_leaves=10,
)


@given(custom_id=st.text(min_size=1, max_size=20), body=st.dictionaries(st.text(max_size=9), JSON))
def test_a_request_and_its_result_keep_what_the_line_says(custom_id: str, body: Any) -> None:
    body = body | {"model": "m", "stream": False}
    [text] = jsonl([line_of(custom_id, body=body)]).splitlines()
    assert checked(text).problems == []
    request = request_of(text)

    # As engines write it: not in ASCII.
    try:
        indented = json.dumps({"echo": body}, indent=1, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        indented = json.dumps({"echo": body}, indent=1).encode()
    result = answered_result("batch_1", 7, request.custom_id, 200, indented)

    assert json.loads(request.body) == body
    assert len(result.record.decode().splitlines()) == 1
    assert json.loads(result.record) == {
        "id": "batch_req_1-7",
        "custom_id": custom_id,
        "response": {"status_code": 200, "request_id": "batch_req_1-7", "body": {"echo": body}},
        "error": None,
    }
    assert not result.is_error


@pytest.mark.parametrize("content", ["汉字" * 1000, list(range(1000))], ids=["text", "tokens"])
def test_a_request_is_not_longer_than_its_line(content: Any) -> None:
    line = line_of("1", body={"model": "m", "prompt": content})
    text = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode()

    assert len(request_of(text).body) < len(text)


def test_errors_and_lines_that_were_not_run_are_told_apart() -> None:
    refused = answered_result("batch_1", 1, "a", 400, b'{"error": {}}')
    expired = unanswered_result("batch_1", 2, "b", "batch_expired", "too late")

    assert refused.is_error
    assert json.loads(refused.record)["response"]["status_code"] == 400
    assert expired.is_error
    assert json.loads(expired.record) == {
        "id": "batch_req_1-2",
        "custom_id": "b",
        "response": None,
        "error": {"code": "batch_expired", "message": "too late"},
    }
