"""Recorded answers in the three formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from apar_core.offline.evaluation.answer_files import read_answer_set
from tests.unit.apar_core.offline.evaluation.test_prompt_sets import FASTCHAT, needs_fastchat


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "answer_some-model.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@needs_fastchat
def test_answers_to_a_benchmark_get_its_categories_and_chats(tmp_path: Path) -> None:
    path = write(tmp_path, {"question_id": 81, "choices": [{"turns": ["Aloha!", "Aye."]}]})

    answers = read_answer_set(path, FASTCHAT)

    assert (answers.label, answers.benchmark) == ("some-model", "mt-bench")
    first, second = answers.answers
    assert (first.turn, first.category, first.text) == (1, "writing", "Aloha!")
    assert [message.role for message in second.messages] == ["user", "assistant", "user"]
    assert second.messages[1].content == "Aloha!"


@needs_fastchat
def test_answers_of_the_older_format_belong_to_vicuna_bench(tmp_path: Path) -> None:
    path = write(tmp_path, {"question_id": 1, "text": "Plan."}, {"question_id": 2, "text": ""})

    answers = read_answer_set(path, FASTCHAT)

    assert answers.benchmark == "vicuna-bench"
    # An empty answer has nothing to replay.
    assert [answer.text for answer in answers.answers] == ["Plan."]


def test_small_categories_of_a_trace_are_joined(tmp_path: Path) -> None:
    line = {"prompt": "Why?", "response": "So.", "history": [{"role": "user", "content": "Hi"}]}
    lines = [{**line, "id": i, "category": "large" if i < 10 else f"small{i}"} for i in range(13)]

    answers = read_answer_set(write(tmp_path, *lines))

    assert answers.benchmark is None
    assert [answer.category for answer in answers.answers] == ["large"] * 10 + ["other"] * 3
    assert [message.content for message in answers.answers[0].messages] == ["Hi", "Why?"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "a"}, "line 1: .*needs a 'question_id'"),
        ({"question_id": 1}, "line 1: .*needs 'choices'"),
        ({"response": "a"}, "line 1: .*needs its 'prompt'"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        read_answer_set(write(tmp_path, line))


@needs_fastchat
def test_unknown_questions_are_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="unknown: 999"):
        read_answer_set(write(tmp_path, {"question_id": 999, "text": "a"}), FASTCHAT)


@needs_fastchat
def test_more_answers_than_turns_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"question_id": 81, "choices": [{"turns": ["a", "b", "c"]}]})

    with pytest.raises(EvaluationError, match="question 81 has 2 turns, its answer 3"):
        read_answer_set(path, FASTCHAT)


def test_a_missing_benchmark_names_the_command_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    with pytest.raises(EvaluationError, match="apar evaluate fetch"):
        read_answer_set(write(tmp_path, {"question_id": 1, "text": "a"}))
