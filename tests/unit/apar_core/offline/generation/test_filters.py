"""Filters on texts like those that SmolLM2-135M writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar_core.offline.generation.filters import (
    SeenQuestions,
    answer_fault,
    is_repetitive,
    question_fault,
)

POINTS = "\n".join(
    f"{n}. **{what}**: {detail}"
    for n, (what, detail) in enumerate(
        [
            ("Tune first", "Check every string with a tuner before you play."),
            ("Play slowly", "Speed comes by itself once your fingers know the way."),
            ("Rest often", "Short breaks keep the hands relaxed and the mind fresh."),
        ],
        start=1,
    )
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("What are the main causes of inflation?", None),
        ("Write a short poem about autumn", None),
        ("how do i learn guitar", None),
        ("请给我五个学习吉他的建议", None),
        ("¿Cómo puedo aprender a tocar la guitarra?", None),
        ("", "empty"),
        ("...", "empty"),
        ("What is \ufffd\ufffd about?", "broken characters"),
        ("What is it?<|im_start|>assistant", "chat markers"),
        ("What is it?\nAssistant: It is a lamp.", "chat markers"),
        ("Hello", "too short"),
        ("Sure! Here are five tips for you.", "answer in place of a question"),
        (", and the second one is larger than the first.", "begins in the middle"),
        ("and the second one is larger than the first.", "begins in the middle"),
        ("I want to write a letter to the", "no ending"),
        ("I'd like to learn about [topic]. How can I get started?", "placeholder"),
        ("What does `x = names[topic_id]` do in [this](a.md) code?", None),
        ("This article will start up again on a different subject.", "asks nothing"),
        ("I am planning to build a church for the village.", None),
        ("The list has 3 rows and 4 columns. Compute the sum of each of them.", None),
        ("Der Hund schläft heute lange in seinem Korb.", None),
        ("Tell me about it. " * 20, "repetition"),
    ],
)
def test_questions_are_rejected_for_their_form(text: str, fault: str | None) -> None:
    assert question_fault(text.strip(), is_cut=False) == fault


def test_a_question_at_the_token_limit_is_too_long() -> None:
    assert question_fault("What are the main causes of inflation", is_cut=True) == "too long"
    assert question_fault("Why is it so? " + "x y " * 1000, is_cut=False) == "too long"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (POINTS, None),
        ("Yes.", None),
        ("I'm sorry, but I cannot help with that.", None),
        (f"<think>\n{'so so so ' * 50}\n</think>\n\n{POINTS}", None),
        ("", "empty"),
        ("<think>\nWait.\n</think>\n\n", "empty"),
        ("A \x00 b", "broken characters"),
        (f"{POINTS}<|im_start|>user\nWhy?", "chat markers"),
        (f"<think>\nWait.\n</think>\n\n{POINTS}</think>", "chat markers"),
        ("The answer is simple. " * 20, "repetition"),
        ("\n".join(f"{n}. Be kind to others." for n in range(1, 9)), "repetition"),
    ],
)
def test_answers_are_rejected_for_their_form(text: str, fault: str | None) -> None:
    assert answer_fault(text, is_cut=False) == fault


def test_an_answer_at_the_token_limit_is_rejected() -> None:
    assert answer_fault(POINTS, is_cut=True) == "cut at the token limit"


@pytest.mark.parametrize(
    ("texts", "faults"),
    [
        (["What is tea?", "what is TEA"], [None, "duplicate"]),
        (["What is tea?", "What is coffee?"], [None, None]),
        (
            [
                "How can I learn to play the guitar well as a beginner?",
                "How can I learn to play the guitar well as a beginner today?",
                "How can I learn to bake bread at home?",
            ],
            [None, "near-duplicate", None],
        ),
        (["怎样学习吉他呢", "怎样学习吉他"], [None, "near-duplicate"]),
    ],
)
def test_a_question_like_an_earlier_one_is_rejected(
    texts: list[str], faults: list[str | None]
) -> None:
    seen = SeenQuestions()

    assert [seen.fault(text) for text in texts] == faults


def test_a_near_duplicate_is_found_among_many_questions_with_the_same_beginning() -> None:
    seen = SeenQuestions()
    for number in range(500):
        assert seen.fault(f"Write a short story about {number}, {number + 1} and the sea") is None

    assert seen.fault("Write a short story about 3, 4 and the sea.") == "duplicate"
    assert seen.fault("Please write a short story about 3, 4 and the sea") == "near-duplicate"


@given(st.lists(st.text(alphabet="abc ", max_size=30), max_size=30))
def test_kept_questions_are_kept_again(texts: list[str]) -> None:
    seen, again = SeenQuestions(), SeenQuestions()
    kept = [text for text in texts if seen.fault(text) is None]

    assert [again.fault(text) for text in kept] == [None] * len(kept)
    assert all(again.fault(text) == "duplicate" for text in kept)


@given(st.text())
def test_every_text_is_either_kept_or_has_a_reason(text: str) -> None:
    for fault in (
        question_fault(text.strip(), is_cut=False),
        answer_fault(text, is_cut=False),
        SeenQuestions().fault(text),
    ):
        assert fault is None or fault


@given(st.text(alphabet="ab \n", min_size=1, max_size=60), st.integers(12, 30))
def test_a_text_written_many_times_is_repetitive(text: str, times: int) -> None:
    repeated = "\n".join([f"one more {text} line"] * times)

    assert is_repetitive(repeated)
