"""Answers that fork, written as answers that join."""

from __future__ import annotations

import pytest

from apar_core.errors import TreeError
from apar_core.offline.data.joined import JoinedAnswer, joined_answer, outline_numbers
from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.data.structure import extract_tree


def detail(text: str) -> ParagraphRecord:
    return ParagraphRecord(text)


def test_a_list_becomes_outlines_threads_and_a_conclusion() -> None:
    answer = chain(
        [("Two tips:\n\n1. **Tea**:", detail(" Drink it.")), ("\n2. **Rest**:", detail(" Sleep."))],
        closing="\n\nBe well.",
    )

    joined = joined_answer(answer)

    assert joined.parent == (
        "Two tips:\n\n<Parallel>\n<Outlines>\n<Outline>1: Tea</Outline>\n"
        "<Outline>2: Rest</Outline>\n</Outlines>",
        "<Conclusion>\nBe well.\n</Conclusion>\n</Parallel>",
    )
    assert joined.blocks == ((" **Tea**: Drink it.\n</Thread>", " **Rest**: Sleep.\n</Thread>"),)
    assert joined.text == (
        joined.parent[0] + "\n<Thread>\n1: **Tea**: Drink it.\n</Thread><Thread>\n"
        "2: **Rest**: Sleep.\n</Thread>\n" + joined.parent[1]
    )


def test_a_detail_that_forks_is_a_block_of_its_own_behind_its_heading() -> None:
    section = chain([(" Lead.\n- A:", detail(" a.")), ("\n- B:", detail(" b."))])
    answer = chain([("1. One:", section), ("\n2. Two:", section)])

    joined = joined_answer(answer)

    assert joined.num_threads == 4
    assert joined.parent[0].startswith("1. One: Lead.\n<Parallel>")
    assert joined.parent[1].startswith("</Parallel>\n2. Two: Lead.\n<Parallel>")
    assert joined.parent[2] == "</Parallel>"
    assert joined.blocks[0] == (" A: a.\n</Thread>", " B: b.\n</Thread>")


def test_text_between_two_details_is_in_the_second_thread_and_no_outline() -> None:
    answer = chain(
        [("Tea helps.", detail(" Drink it.")), ("\n\nRest.\n\nSleep helps.", detail(" Lie."))]
    )

    joined = joined_answer(answer)

    assert "<Outline>1: Tea helps.</Outline>\n<Outline>2: Sleep helps.</Outline>" in joined.text
    assert joined.blocks == (
        (" Tea helps. Drink it.\n</Thread>", " Rest.\n\nSleep helps. Lie.\n</Thread>"),
    )


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("1. Tea:", "Tea:"),
        ("10) Tea:", "Tea:"),
        ("- Tea:", "Tea:"),
        ("**1. Tea**:", "**Tea**:"),
        ("**1.** Tea:", "Tea:"),
        ("### 1. Tea:", "Tea:"),
        ("Step 2. Tea:", "Step 2. Tea:"),
        ("Tea - or water:", "Tea - or water:"),
        ("*Tea*:", "*Tea*:"),
    ],
)
def test_only_the_number_of_a_point_is_left_out(heading: str, expected: str) -> None:
    joined = joined_answer(chain([(heading, detail(" A.")), ("\nRest:", detail(" B."))]))

    assert joined.blocks[0][0] == f" {expected} A.\n</Thread>"


def test_a_thought_and_the_blank_before_an_answer_come_before_the_block() -> None:
    forks = [("<think>\nTea?\n</think>\n\n1. Tea:", detail(" A.")), ("\n2. Rest:", detail(" B."))]

    assert joined_answer(chain(forks)).parent[0].startswith("<think>\nTea?\n</think>\n\n<Parallel>")
    forks[0] = (" 1. Tea:", detail(" A."))
    assert (
        joined_answer(chain(forks))
        .parent[0]
        .startswith(" <Parallel>\n<Outlines>\n<Outline>1: Tea<")
    )


@pytest.mark.parametrize("text", ["Lima.", "First sentence. Second sentence."])
def test_an_answer_without_forks_has_no_block(text: str) -> None:
    assert joined_answer(ParagraphRecord(text)) == JoinedAnswer((text,))


def test_a_single_detail_needs_no_block() -> None:
    assert joined_answer(chain([("A.", detail(" B."))])) == JoinedAnswer(("A. B.",))


def test_the_text_of_a_recorded_answer_is_kept() -> None:
    response = (
        "Sure, here are some ideas for a good garden:\n\n"
        "1. Water early: The sun is low then, so less is lost.\n"
        "2. Add compost: It feeds the soil for many months.\n"
        "3. Mulch the beds: It keeps the weeds away.\n\nEnjoy your garden!"
    )

    joined = joined_answer(extract_tree(response).tree)

    assert joined.num_threads == 3
    for line in response.splitlines():
        assert line.partition(". ")[2] in joined.text if line[:1].isdigit() else line in joined.text


def test_outlines_are_read_from_the_last_block_and_count_once() -> None:
    text = "<Outlines><Outline>1: a</Outline></Outlines>"

    assert outline_numbers(text) == ["1"]
    assert outline_numbers(text + "<Outlines><Outline> 2: b</Outline><Outline>2: c") == ["2"]
    assert outline_numbers("no block") == []


def test_texts_and_blocks_must_fit() -> None:
    with pytest.raises(TreeError, match="1 parent texts around 1 blocks"):
        JoinedAnswer(("a",), (("b",),))
