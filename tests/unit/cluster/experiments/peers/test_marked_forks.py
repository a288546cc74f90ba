"""What holds for every program that writes a marker where an answer forks."""

from __future__ import annotations

from functools import partial

import pytest

from cluster.experiments.peers.client_forking import ClientForking
from cluster.experiments.peers.parent_stops import ParentStops
from tests.unit.cluster.experiments.peers.played import END, Played, nested_answer, unforked_answer

MARK = 9
PROGRAMS = (ClientForking, ParentStops, partial(ParentStops, free_merge=True))
every_program = pytest.mark.parametrize(
    "build", PROGRAMS, ids=["client-forking", "parent-stops", "parent-stops-free"]
)


@every_program
@pytest.mark.parametrize("seed", range(20))
def test_the_text_is_the_answer_in_any_order_of_outputs_however_many_tokens_come_at_once(
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
