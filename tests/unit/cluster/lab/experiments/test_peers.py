"""The programs of other methods: their requests, prompts and texts, played without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from apar_core.offline.data.records import ChatMessage, ParagraphRecord
from cluster.lab.experiments.peers import (
    POINT_PROMPT,
    SKELETON_PROMPT,
    ClientForking,
    ParentStops,
    SkeletonOfThought,
    skeleton_prompts,
)
from cluster.loadtest.replay_answers import ReplayAnswer
from tests.unit.cluster.lab.experiments.played_programs import (
    END,
    Played,
    nested_answer,
    unforked_answer,
)

# Stands in for fork and child tokens.
MARK = 9
PROMPT = [100, 101, 102]


def test_a_clients_child_reads_all_that_its_parent_has_written() -> None:
    played = Played(ClientForking(nested_answer(), MARK))

    assert played.prompt("root") == PROMPT
    assert played.script("root") == [10, 11, MARK, 12, MARK, 13, END]
    assert played.prompt("root.0") == [*PROMPT, 10, 11, MARK, MARK]
    assert played.script("root.0") == [20, MARK, 21, END]
    assert played.prompt("root.0.0") == [*PROMPT, 10, 11, MARK, MARK, 20, MARK, MARK]
    assert played.script("root.0.0") == [30, 31, END]
    assert played.prompt("root.1") == [*PROMPT, 10, 11, MARK, 12, MARK, MARK]
    assert played.script("root.1") == [22, END]


def test_a_clients_parent_goes_on_while_its_children_write() -> None:
    played = Played(ClientForking(nested_answer(), MARK))

    # Forks are the third and fifth token of the root thread, and the second of its first child.
    assert played.begun_in == {"root": 0, "root.0": 3, "root.1": 5, "root.0.0": 5}
    assert played.num_rounds == 8


def test_the_text_is_made_of_what_came_not_of_what_was_asked_for() -> None:
    program = ClientForking(nested_answer(), MARK)
    program.start()
    for name, token_ids in {
        "root": [10, 99, MARK, 12, MARK, 13, END],
        "root.0": [20, MARK, 21, END],
        "root.0.0": [30, END],
        "root.1": [22, END],
    }.items():
        program.on_tokens(name, token_ids)

    assert program.text_ids() == [10, 99, 20, 30, END, 21, 12, 22, 13, END]


OUTLINE = [10, 11, MARK, 12, MARK]


def test_a_parent_stops_at_its_last_fork_and_its_children_read_the_whole_outline() -> None:
    played = Played(ParentStops(nested_answer(), MARK))

    assert played.prompt("root") == PROMPT
    assert played.script("root") == OUTLINE
    assert played.prompt("root.0") == [*PROMPT, *OUTLINE, MARK]
    assert played.script("root.0") == [20, MARK]
    assert played.prompt("root.1") == [*PROMPT, *OUTLINE, MARK]
    assert played.script("root.1") == [22, END]
    assert played.prompt("root.0.0") == [*PROMPT, *OUTLINE, MARK, 20, MARK, MARK]


def test_a_parent_goes_on_behind_all_that_its_children_wrote() -> None:
    played = Played(ParentStops(nested_answer(), MARK))

    deep = [MARK, 30, 31, END]
    assert played.prompt("root.0/rest") == [*PROMPT, *OUTLINE, MARK, 20, MARK, *deep]
    assert played.script("root.0/rest") == [21, END]
    first, second = [MARK, 20, MARK, *deep, 21, END], [MARK, 22, END]
    assert played.prompt("root/rest") == [*PROMPT, *OUTLINE, *first, *second]
    assert played.script("root/rest") == [13, END]


def test_it_goes_on_only_after_the_last_of_them() -> None:
    played = Played(ParentStops(nested_answer(), MARK))

    # 5 tokens of outline, 2 and 2 of the first child's, 3 of its child's, 2 more of the first's.
    assert played.begun_in["root.0"] == played.begun_in["root.1"] == 5
    assert played.begun_in["root.0.0"] == 7
    assert played.begun_in["root.0/rest"] == 10
    assert played.begun_in["root/rest"] == 12
    assert played.num_rounds == 14


def test_a_free_merge_leaves_the_childrens_text_out_of_what_is_read() -> None:
    answer = nested_answer()
    program = ParentStops(answer, MARK, free_merge=True)

    played = Played(program)

    assert played.prompt("root/rest") == [*PROMPT, *OUTLINE]
    assert played.prompt("root.0/rest") == [*PROMPT, *OUTLINE, MARK, 20, MARK]
    assert program.text_ids() == answer.flat


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
def test_the_text_of_both_stages_is_the_answer(seed: int) -> None:
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


PROGRAMS = (ClientForking, ParentStops, partial(ParentStops, free_merge=True))
every_program = pytest.mark.parametrize(
    "build", PROGRAMS, ids=["client-forking", "parent-stops", "parent-stops-free"]
)


@every_program
@pytest.mark.parametrize("seed", range(20))
def test_the_text_is_the_answer_in_any_order_of_outputs(
    build: type[ClientForking] | type[ParentStops], seed: int
) -> None:
    answer = nested_answer()
    program = build(answer, MARK)

    Played(program, most_tokens=4, seed=seed)

    assert program.text_ids() == answer.flat == [10, 11, 20, 30, 31, 21, 12, 22, 13, END]


@every_program
def test_an_answer_without_forks_is_one_request(
    build: type[ClientForking] | type[ParentStops],
) -> None:
    answer = unforked_answer()
    program = build(answer, MARK)

    played = Played(program)

    assert list(played.submitted) == ["root"]
    assert program.text_ids() == answer.flat
