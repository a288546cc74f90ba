"""Recorded requests: read, written, and refused with the line of an error."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar_core.errors import EvaluationError
from apar_core.offline.data.records import ChatMessage
from cluster.loadtest.trace import TraceLine, TraceWriter, read_trace

DATA = Path(__file__).resolve().parents[5] / "shared" / "data" / "traces"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def trace_file(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_line_needs_only_a_prompt_and_its_response(tmp_path: Path) -> None:
    path = trace_file(
        tmp_path,
        {"prompt": "Why?", "response": "Because.", "words": 1},
        {"prompt": "No?", "response": ""},
        {
            "id": 7,
            "category": "stem",
            "source": "mt_bench",
            "prompt": "And then?",
            "response": "Nothing.",
            "history": [
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "content": "So."},
            ],
        },
    )

    first, second = read_trace(path)

    assert first == TraceLine("0", first.category, "Why?", "Because.")
    assert (second.id, second.category, second.source) == ("7", "stem", "mt_bench")
    assert second.messages == (
        ChatMessage("user", "Why?"),
        ChatMessage("assistant", "So."),
        ChatMessage("user", "And then?"),
    )
    assert read_trace(path, limit=1) == [first]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "trace.jsonl has no recorded answer"),
        ([{"prompt": "a", "response": ""}], "no recorded answer"),
        ([{"prompt": "a", "response": "b"}, {"response": "b"}], "line 2: prompt: Field required"),
        ([{"prompt": "a", "response": 3}], "line 1: response"),
        ([{"question_id": 1, "text": "b"}], "line 1: prompt: Field required"),
        ([{"id": 4, "prompt": "a", "response": "b"}] * 2, "two answers have the id '4'"),
    ],
)
def test_an_invalid_trace_is_refused_with_the_line(
    tmp_path: Path, lines: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(EvaluationError, match=message):
        read_trace(trace_file(tmp_path, *lines))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"none\.jsonl cannot be read"):
        read_trace(tmp_path / "none.jsonl")


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data does not lie beside the repository")
@pytest.mark.parametrize(("name", "number"), [("structured", 474), ("mixed", 505)])
def test_the_shared_traces_are_read_whole(name: str, number: int) -> None:
    lines = read_trace(DATA / f"{name}.jsonl")

    assert len(lines) == number
    assert all(line.prompt and line.response and line.source for line in lines)


@given(st.lists(st.tuples(TEXTS, TEXTS.filter(bool), st.lists(st.tuples(TEXTS, TEXTS)))))
def test_written_answers_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, answers: list[tuple[str, str, list[Any]]]
) -> None:
    path = tmp_path_factory.mktemp("saved") / "answers.jsonl"
    lines = [
        TraceLine(
            f"r{number}", "saved", prompt, response, "http://x", tuple(map(_message, history))
        )
        for number, (prompt, response, history) in enumerate(answers)
    ]

    with closing(TraceWriter(path)) as saved:
        for line in lines:
            saved.add(line)
            # Flushed after each line.
            assert read_trace(path)[-1] == line

    if lines:
        assert read_trace(path) == lines
    with pytest.raises(EvaluationError, match="exists already"):
        TraceWriter(path)


def _message(turn: tuple[str, str]) -> ChatMessage:
    return ChatMessage(*turn)


def test_a_missing_folder_is_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    TraceWriter(tmp_path / "new" / "answers.jsonl").close()

    assert (tmp_path / "new" / "answers.jsonl").is_file()
    with pytest.raises(EvaluationError, match="cannot be written: Not a directory"):
        TraceWriter(tmp_path / "file" / "new" / "answers.jsonl")
