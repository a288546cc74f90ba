"""Judge prompts and parsing of ratings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar_core.errors import EvaluationError
from apar_core.offline.evaluation.prompt_sets import Question
from apar_core.offline.evaluation.quality import (
    JudgePrompt,
    judge_chat,
    needs_reference,
    parse_rating,
    prompt_name,
)

TEMPLATES = {
    "single-v1": "Q: {question} A: {answer}",
    "single-math-v1": "Q: {question} R: {ref_answer_1} A: {answer}",
    "single-v1-multi-turn": "{question_1}/{answer_1}/{question_2}/{answer_2}",
    "single-math-v1-multi-turn": "{ref_answer_1}/{ref_answer_2} {question_2}/{answer_2}",
}
PROMPTS = {
    name: JudgePrompt(name=name, system_prompt=f"system of {name}", prompt_template=template)
    for name, template in TEMPLATES.items()
}
WRITING = Question(question_id="1", category="writing", turns=("Write.", "Shorter."))
MATH = Question(question_id="2", category="math", turns=("1+1?", "And 2+2?"), reference=("2", "4"))


@pytest.mark.parametrize(
    ("question", "turn", "expected"),
    [
        (WRITING, 1, "Q: Write. A: long {text}"),
        (WRITING, 2, "Write./long {text}/Shorter./short"),
        (MATH, 1, "Q: 1+1? R: 2 A: long {text}"),
        (MATH, 2, "2/4 And 2+2?/short"),
    ],
)
def test_the_prompt_depends_on_turn_and_category(
    question: Question, turn: int, expected: str
) -> None:
    system, user = judge_chat(PROMPTS, question, turn, ("long {text}", "short"))

    assert user.content == expected
    assert system.content == f"system of {prompt_name(turn, with_reference=question is MATH)}"


def test_a_missing_reference_for_the_second_turn_is_named() -> None:
    question = MATH.model_copy(update={"reference": ("2",)})

    with pytest.raises(EvaluationError, match="question 2 has no ref_answer_2"):
        judge_chat(PROMPTS, question, 2, ("2", "4"))


def test_only_some_categories_are_judged_against_a_reference() -> None:
    referenced = WRITING.model_copy(update={"reference": ("a", "b")})

    assert [needs_reference(q) for q in (WRITING, referenced, MATH)] == [False, False, True]
    assert not needs_reference(MATH.model_copy(update={"reference": ()}))


@pytest.mark.parametrize(
    ("text", "rating"),
    [
        ("Rating: [[5]]", 5.0),
        ("It is good. [[7.5]] Or [[2]]?", 7.5),
        ("[8]", 8.0),
        ("Point [1] is wrong. Rating: [[9]]", 9.0),
        ("[[10]]", 10.0),
        ("[[11]]", None),
        ("[[0]]", None),
        ("Rating: 5", None),
        ("[[rating]]", None),
        ("", None),
    ],
)
def test_ratings_are_parsed(text: str, rating: float | None) -> None:
    assert parse_rating(text) == rating


@given(st.text())
def test_any_text_gives_a_rating_of_one_to_ten_or_none(text: str) -> None:
    rating = parse_rating(text)

    assert rating is None or 1 <= rating <= 10
