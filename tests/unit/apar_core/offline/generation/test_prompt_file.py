"""Questions from files of every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import DataError
from apar_core.offline.generation.prompt_file import read_prompts

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "So."}
LATER = {"role": "user", "content": "And then?"}


def prompts(path: Path) -> list[list[dict[str, str]]]:
    return [[message.as_dict() for message in prompt] for prompt in read_prompts(path)]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"prompt": "Why?"}, [USER]),
        ({"turns": ["Why?", "And then?"], "question_id": 3}, [USER]),
        ({"messages": [SYSTEM, USER]}, [SYSTEM, USER]),
        # The last message is the question if nothing answers it.
        ({"messages": [USER, ANSWER, LATER]}, [USER]),
        ({"prompt": "And then?", "history": [USER, ANSWER]}, [USER, ANSWER, LATER]),
        # Recorded chats: the first question, without the recorded answers.
        ({"messages": [SYSTEM, USER, ANSWER, LATER, ANSWER]}, [SYSTEM, USER]),
        ({"messages": [ANSWER, USER, ANSWER]}, [USER]),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Why?"},
                    {"from": "gpt", "value": "So."},
                ],
                "system": "Be brief.",
            },
            [SYSTEM, USER],
        ),
        ({"prompt": "Why?", "response": "So."}, [USER]),
    ],
)
def test_an_item_gives_its_first_question(
    tmp_path: Path, item: dict[str, Any], expected: list[dict[str, str]]
) -> None:
    array, lines = tmp_path / "array.json", tmp_path / "lines.jsonl"
    array.write_text(json.dumps([item, item]))
    lines.write_text(json.dumps(item) + "\n\n")

    assert prompts(array) == [expected, expected]
    assert prompts(lines) == [expected]


def test_a_text_file_has_one_question_per_line(tmp_path: Path) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("Why?\n\n  And then? \n", encoding="utf-8-sig")

    assert prompts(path) == [[USER], [LATER]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "Why?"}\n{"answer": 1}\n', "line 2: missing field"),
        ('{"prompt": "Why?"}\n{broken\n', "line 2: broken JSON"),
        ('{"prompt": " "}\n', "line 1: missing field"),
        ('{"conversations": [{"from": "gpt", "value": "So."}]}', "line 1: no question"),
        ('[{"prompt": "Why?"}', "item 2: damaged array"),
        ("\n", "contains no questions"),
    ],
)
def test_a_file_with_an_unusable_item_is_refused_with_its_place(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(text)

    with pytest.raises(DataError, match=words):
        read_prompts(path)
