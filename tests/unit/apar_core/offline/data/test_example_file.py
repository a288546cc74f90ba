from __future__ import annotations

import json
from pathlib import Path

import pytest

from apar_core.errors import DataError
from apar_core.offline.data.example_file import example_line, read_examples
from apar_core.offline.data.records import ChatMessage, ExampleRecord, ParagraphRecord, chain
from tests.fakes.example_files import write_examples

ANSWER = chain(
    [("Root:", ParagraphRecord(" Detail\u2028\r.")), ("\n2:", ParagraphRecord(" b"))], "!"
)
EXAMPLE = ExampleRecord("ordered_list", (ChatMessage("user", "Ä?"),), ANSWER, example_id="a:1:1")


def test_a_line_has_the_documented_format() -> None:
    assert json.loads(example_line(EXAMPLE)) == {
        "id": "a:1:1",
        "kind": "ordered_list",
        "messages": [{"role": "user", "content": "Ä?"}],
        "answer": [
            {"text": "Root:", "detail": [{"text": " Detail\u2028\r."}]},
            {"text": "\n2:", "detail": [{"text": " b"}]},
            {"text": "!"},
        ],
    }


def test_written_examples_are_read_from_file_and_folder(tmp_path: Path) -> None:
    plain = ExampleRecord("unstructured", EXAMPLE.messages, ParagraphRecord("x"), example_id="b")
    write_examples(tmp_path / "structured.jsonl", [EXAMPLE, EXAMPLE])
    write_examples(tmp_path / "unstructured.jsonl", [plain])

    assert list(read_examples(tmp_path / "structured.jsonl")) == [EXAMPLE, EXAMPLE]
    assert list(read_examples(tmp_path)) == [EXAMPLE, EXAMPLE, plain]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ('{"id": "x"}', "kind: Field required"),
        ('{"id": "x", "kind": "y", "messages": [], "answer": []}', "messages"),
        (
            '{"id":"x","kind":"y","messages":[{"role":"user","content":"q"}],"answer":[]}',
            "no paragraph",
        ),
        (
            '{"id":"x","kind":"y","messages":[{"role":"assistant","content":"q"}],'
            '"answer":[{"text":"a"}]}',
            "'assistant'",
        ),
        (
            '{"id":"x","kind":"y","messages":[{"role":"user","content":"q"}],'
            '"answer":[{"text":"a"},{"text":"b"}]}',
            "without a fork",
        ),
    ],
)
def test_errors_in_a_line_name_its_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_bytes(example_line(EXAMPLE) + line.encode() + b"\n")

    with pytest.raises(DataError, match=r"examples.jsonl, line 2: ") as error:
        list(read_examples(path))

    assert words in str(error.value)


def test_missing_files_and_folders_without_examples_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(DataError):
            list(read_examples(path))


def test_an_example_needs_id_question_and_unicode() -> None:
    question = (ChatMessage("user", "q"),)
    for example in (
        ExampleRecord("x", question, ParagraphRecord("a")),
        ExampleRecord("x", (), ParagraphRecord("a"), example_id="i"),
        ExampleRecord("x", question, ParagraphRecord("\ud800"), example_id="i"),
    ):
        with pytest.raises(DataError):
            example_line(example)
