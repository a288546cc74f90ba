from __future__ import annotations

from collections.abc import Sequence

import pytest

from apar_core.offline.data.records import ChatMessage, ParagraphRecord
from apar_core.workload.replay_answers import ReplayAnswer
from cluster.experiments.peers.skeleton_of_thought import (
    POINT_PROMPT,
    SKELETON_PROMPT,
    SkeletonOfThought,
    skeleton_prompts,
)
from tests.unit.cluster.experiments.peers.played import (
    END,
    Played,
    nested_answer,
    unforked_answer,
)

MARK = 9
POINT_ONE = ParagraphRecord("20", ParagraphRecord("30 31"), ParagraphRecord("21"))
POINT_TWO = ParagraphRecord("22")
NESTED = ParagraphRecord(
    "Well:\n\n1. Ten",
    POINT_ONE,
    ParagraphRecord("\n2. Twelve", POINT_TWO, ParagraphRecord("\nSo.")),
)
"""The nested answer as text, token by token but for the root thread's."""


class LetterText:
    """Token 1000 + n stands for the character n."""

    def encode(self, text: str) -> list[int]:
        return [1000 + ord(character) for character in text]

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self.encode("".join(f"[{message.content}]" for message in messages))


def two_stages(answer: ReplayAnswer, record: ParagraphRecord) -> SkeletonOfThought:
    return SkeletonOfThought(answer, MARK, skeleton_prompts(answer, record, LetterText()))


def read(prompt_ids: Sequence[int]) -> str:
    return "".join(chr(token - 1000) for token in prompt_ids)


def test_the_skeleton_is_what_the_root_thread_writes() -> None:
    played = Played(two_stages(nested_answer(), NESTED))

    assert read(played.prompt("skeleton")) == f"[{SKELETON_PROMPT.format(question='How?')}]"
    assert played.script("skeleton") == [10, 11, 12, 13, END]


def test_each_point_is_asked_for_with_question_skeleton_and_the_point_itself() -> None:
    played = Played(two_stages(nested_answer(), NESTED))

    question = {"question": "How?", "skeleton": "Well:\n\n1. Ten\n2. Twelve\nSo."}
    first, second = (POINT_PROMPT.format(**question, index=index) for index in (1, 2))
    assert read(played.prompt("root.0")) == f"[{first}]1. Ten"
    assert read(played.prompt("root.1")) == f"[{second}]2. Twelve"
    # With all that stands below it: the method has one level.
    assert played.script("root.0") == [20, 30, 31, 21, END]
    assert played.script("root.1") == [22, END]


def test_points_are_asked_for_when_the_skeleton_has_ended() -> None:
    played = Played(two_stages(nested_answer(), NESTED))

    assert played.begun_in == {"skeleton": 0, "root.0": 5, "root.1": 5}
    assert played.num_rounds == 10


@pytest.mark.parametrize("seed", range(20))
def test_the_text_is_the_answer(seed: int) -> None:
    answer = nested_answer()
    program = two_stages(answer, NESTED)

    Played(program, most_tokens=4, seed=seed)

    assert program.text_ids() == answer.flat == [10, 11, 20, 30, 31, 21, 12, 22, 13, END]


def test_a_question_without_points_is_asked_as_it_is() -> None:
    answer = unforked_answer()
    program = two_stages(answer, ParagraphRecord("Ten."))

    played = Played(program)

    assert list(played.submitted) == ["skeleton"]
    assert played.prompt("skeleton") == list(answer.prompt_ids)
    assert program.text_ids() == answer.flat
