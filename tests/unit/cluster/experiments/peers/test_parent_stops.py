from __future__ import annotations

from cluster.experiments.peers.parent_stops import ParentStops
from tests.unit.cluster.experiments.peers.played import (
    END,
    Played,
    nested_answer,
)

# Stands in for fork and child tokens.
MARK = 9
PROMPT = [100, 101, 102]
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
