"""Questions from benchmarks and from files, in every form that is understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from apar_core.errors import EvaluationError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.fork_check import ForkCheckSettings, held_out_prompts
from apar_core.offline.evaluation.prompt_sets import HELD_OUT, Question, load_prompts
from apar_core.offline.evaluation.replay_text import ModelText

FASTCHAT = Path(__file__).resolve().parents[6] / "shared" / "data" / "fastchat"
needs_fastchat = pytest.mark.skipif(not FASTCHAT.is_dir(), reason=f"{FASTCHAT} is not here")


def write(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "questions.jsonl"
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def test_three_forms_of_a_line_give_the_same_kind_of_question(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    path = write(
        tmp_path,
        {"question_id": 7, "category": "stem", "turns": ["Why?", "And now?"]},
        {"id": "x", "prompt": "Hello", "history": [system], "response": "not read"},
        {"messages": [system, {"role": "user", "content": "Hello"}]},
    )

    first, second, third = load_prompts(str(path))

    assert first == Question(question_id="7", category="stem", turns=("Why?", "And now?"))
    assert (second.question_id, third.question_id) == ("x", "3")
    assert second.history == third.history == (ChatMessage("system", "Be brief."),)
    assert second.turns == third.turns == ("Hello",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "line 2: .*JSON"),
        ({"category": "x"}, "line 2: .*exactly one of"),
        ({"prompt": "a", "turns": ["b"]}, "line 2: .*exactly one of"),
        ({"prompt": "  "}, "line 2: .*the question is empty"),
        ({"turns": []}, "line 2: .*the question is empty"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "line 2: .*user's turn"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "line 2: messages.0.role"),
        ({"question_id": 1, "prompt": "again"}, "two questions have the id '1'"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path, {"question_id": 1, "prompt": "fine"}, line)

    with pytest.raises(EvaluationError, match=message):
        load_prompts(str(path))


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "has no question"), (b'{"prompt": "\xff"}\n', "is not UTF-8")]
)
def test_files_without_readable_questions_are_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(content)

    with pytest.raises(EvaluationError, match=message):
        load_prompts(str(path))


def test_a_name_that_is_nothing_is_told_what_it_could_be() -> None:
    with pytest.raises(EvaluationError, match="neither one of vicuna-bench, mt-bench, held-out"):
        load_prompts("mt_bench")


def test_a_later_turn_holds_the_answers_before_it() -> None:
    question = Question(question_id="1", category="x", turns=("A", "B"))

    assert question.messages(0, ()) == (ChatMessage("user", "A"),)
    assert question.messages(1, ("a",)) == (
        ChatMessage("user", "A"),
        ChatMessage("assistant", "a"),
        ChatMessage("user", "B"),
    )


@needs_fastchat
@pytest.mark.parametrize(
    ("name", "num_turns", "num_references"), [("vicuna-bench", 80, 10), ("mt-bench", 160, 60)]
)
def test_the_benchmarks_are_whole(name: str, num_turns: int, num_references: int) -> None:
    questions = load_prompts(name, FASTCHAT)

    assert sum(len(question.turns) for question in questions) == num_turns
    assert sum(len(question.reference) for question in questions) == num_references


def test_the_held_out_prompts_are_those_of_the_fork_check() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    text = ModelText(tokenizer, "apar-tiny")
    expected = held_out_prompts(ForkCheckSettings(), tokenizer)

    questions = load_prompts(HELD_OUT)

    encoded = [
        text.encode_prompt(question.turns[0])
        if question.raw_prompt
        else text.encode_chat(question.messages(0, ()))
        for question in questions
    ]
    assert encoded == [prompt.token_ids for prompt in expected]
    assert [question.category for question in questions] == [prompt.kind for prompt in expected]
    assert any(question.raw_prompt for question in questions)
