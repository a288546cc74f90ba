# Quotation marks and full stops of several scripts are what this module is about.
# ruff: noqa: RUF001

from __future__ import annotations

import time

import pytest

from apar_core.offline.data.sentences import first_sentence_end


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        ("It rains.", " We stay."),
        ("Is it raining?", "\nWe stay."),
        ("He is 3.5 m tall.", " She is not."),
        ("Dr. Smith left.", " He was tired."),
        ("J. K. Rowling wrote it.", " It sold well."),
        ("Take fruit, e.g. Apples or pears.", " Then eat."),
        ("See Fig. 3 for it.", " It is blue."),
        ("It is Symphony No. 5 in C minor, Op. 67.", " It is loud."),
        ("The answer is no.", " We stay."),
        ("We met at 5 p.m.", " Then we ate."),
        ("The U.S. Department of Justice sued.", " It won."),
        ("They live in the U.S.", " The weather is hot."),
        ("United States v. Microsoft is a case.", " It is famous."),
        ("1. Be early.", " Nobody waits."),
        ("Wait... what?", " Yes."),
        ('He said, "Go. Run."', " Then he left."),
        ("“Stop!” she cried.", " He did."),
        ("(One. Two.)", " Three."),
        ("It is bold.**", " It is not."),
        ("今天很好。", "我们走吧。"),
        ("本当ですか？", "はい。"),
        ("「行く。」と言った。", "そして行った。"),
        ("यह अच्छा है।", " हाँ।"),
    ],
)
def test_the_end_of_the_first_sentence_is_found(first: str, rest: str) -> None:
    assert first_sentence_end(first + rest) == len(first)


@pytest.mark.parametrize(
    "text", ["", "One sentence.", "No stop at all", "One sentence. \n", "See example.com for it"]
)
def test_a_single_sentence_has_no_rest(text: str) -> None:
    assert first_sentence_end(text) is None


def test_a_quotation_up_to_the_end_is_split_into_sentences() -> None:
    assert first_sentence_end('Voice: "Jazz is old. It lives."') == len('Voice: "Jazz is old.')


@pytest.mark.parametrize("unit", ["mr. ", '"A. ', "“ A. ", ".)", "((((", "...."])
def test_hostile_text_takes_linear_time(unit: str) -> None:
    def seconds(num_characters: int) -> float:
        text = unit * (num_characters // len(unit)) + "x"
        start = time.process_time()
        first_sentence_end(text)
        return time.process_time() - start

    # Quadratic time would be 64 times more. A busy machine takes longer, but not each time.
    long_s, short_s = (min(seconds(number) for _ in range(3)) for number in (400_000, 50_000))
    assert long_s < 24 * short_s + 0.05
