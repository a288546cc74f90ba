from __future__ import annotations

from cluster.experiments.peers.client_forking import ClientForking
from tests.unit.cluster.experiments.peers.played import (
    END,
    Played,
    nested_answer,
)

# Stands in for fork and child tokens.
MARK = 9
PROMPT = [100, 101, 102]


def test_a_child_is_asked_for_behind_all_that_its_parent_has_written() -> None:
    played = Played(ClientForking(nested_answer(), MARK))

    assert played.prompt("root") == PROMPT
    assert played.script("root") == [10, 11, MARK, 12, MARK, 13, END]
    assert played.prompt("root.0") == [*PROMPT, 10, 11, MARK, MARK]
    assert played.script("root.0") == [20, MARK, 21, END]
    assert played.prompt("root.0.0") == [*PROMPT, 10, 11, MARK, MARK, 20, MARK, MARK]
    assert played.script("root.0.0") == [30, 31, END]
    assert played.prompt("root.1") == [*PROMPT, 10, 11, MARK, 12, MARK, MARK]
    assert played.script("root.1") == [22, END]


def test_the_parent_goes_on_while_its_children_write() -> None:
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
