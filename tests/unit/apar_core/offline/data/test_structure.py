"""Extraction rules of the paper's appendix B."""

# ruff: noqa: RUF001, SIM905

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.offline.data.records import (
    ParagraphRecord,
    count_forks,
    flat_text,
    thread_paragraphs,
)
from apar_core.offline.data.structure import StructureRules, ambiguity, extract_tree, has_list
from tests.fakes.examples import num_examples

PAPER = StructureRules()
UNORDERED = StructureRules(unordered_lists=True)
COLONLESS = StructureRules(points_without_colon=True)
LIST = (
    "Three tips:\n\n"
    "1. **Rest**: Sleep eight hours a night.\n"
    "2. **Move:** Walk for half an hour.\n"
    "3. Eat:\n   - fruit every day\n   - little sugar\n\n"
    "Good luck with it."
)


def forks(answer: str, rules: StructureRules = PAPER) -> list[tuple[str, str]]:
    """Return (root, detail) of each fork of the root thread; the closing has detail ""."""
    tree = extract_tree(answer, rules).tree
    return [
        (paragraph.text, flat_text(paragraph.first_child) if paragraph.first_child else "")
        for paragraph in thread_paragraphs(tree)
    ]


def test_a_point_forks_after_its_colon_and_the_next_root_starts_with_the_line_break() -> None:
    assert extract_tree(LIST).kind == "ordered_list"
    assert forks(LIST) == [
        ("Three tips:\n\n1. **Rest**:", " Sleep eight hours a night."),
        ("\n2. **Move:**", " Walk for half an hour."),
        ("\n3. Eat:", "\n   - fruit every day\n   - little sugar"),
        ("\n\nGood luck with it.", ""),
    ]


def test_two_points_are_not_an_ordered_list() -> None:
    extracted = extract_tree("1. Rest: Sleep eight hours.\n2. Move: Walk for an hour.")

    assert (extracted.kind, extracted.reason) == ("unstructured", "no structure")


@pytest.mark.parametrize(
    ("content", "kind"), [("ten chars.", "ordered_list"), ("nine char", "unstructured")]
)
def test_each_detail_needs_ten_characters(content: str, kind: str) -> None:
    answer = f"1. Rest: Sleep eight hours.\n2. Move: {content}\n3. Eat: Less sugar and fat."

    assert extract_tree(answer).kind == kind


def test_nested_lists_belong_to_the_detail_of_their_point() -> None:
    answer = "".join(
        f"{number}. Part {number}:\n   1. first: one thing\n   2. second: one more\n\n"
        for number in (1, 2, 3)
    )

    assert count_forks(extract_tree(answer).tree) == 3


def test_points_of_all_lists_count_together() -> None:
    answer = (
        "Pains:\n\n1. Leads: Finding people is hard.\n\n2. Time: There is never enough.\n\n"
        "Cures:\n\n1. Leads: A machine finds them.\n\n2. Time: A machine saves it."
    )

    assert [root for root, _ in forks(answer)][2] == "\n\nCures:\n\n1. Leads:"


def test_a_trailing_bare_number_belongs_to_no_detail() -> None:
    answer = LIST.removesuffix("\n\nGood luck with it.") + "\n4."

    assert forks(answer)[-1] == ("\n4.", "")


def test_years_times_and_numbers_out_of_order_are_not_points() -> None:
    answer = "In\n1998. The firm: it was founded then.\n1999. It grew: a great deal of it.\n7. x: y"

    assert extract_tree(answer).kind == "unstructured"
    assert forks(
        "1. At 10:30 we eat: bread and cheese.\n2. Later: tea and some cake.\n3. x: " + LIST
    )[0][0].endswith("eat:")


@pytest.mark.parametrize(
    "marks",
    [
        ("4. ", "5. ", "6. "),
        ("0. ", "1. ", "2. "),
        ("1. ", "2. ", "4. "),
        ("1.\u00a0", "2.\u00a0", "3.\u00a0"),
        ("\u00a01. ", "\u00a02. ", "\u00a03. "),
        ("1.\u3000", "2.\u202f", "3.\u2007"),
        ("1. ", "1. ", "1. "),
    ],
)
def test_lists_fork_wherever_they_start_and_whatever_spaces_they_have(
    marks: tuple[str, ...],
) -> None:
    answer = "\n\n".join(f"{mark}Point: First here. Then there." for mark in marks)

    assert extract_tree(answer).kind == "ordered_list"
    assert [detail for _, detail in forks(answer)] == [" First here. Then there."] * 3


def test_a_single_number_in_prose_is_not_a_point() -> None:
    answer = "He was\n42. His wife: somewhat younger.\n\n" + LIST

    assert [detail for _, detail in forks(answer)] == [detail for _, detail in forks(LIST)]


def test_blank_lines_with_no_break_spaces_separate_paragraphs() -> None:
    assert extract_tree("Cats sleep. All day.\n\u00a0\nDogs run. Far.").kind == "paragraphs"


def test_the_first_sentence_of_a_paragraph_is_its_root() -> None:
    answer = "Cats sleep. They do it all day.\n\nDogs run.\r\n\r\nBirds fly. Some only walk.\n"

    assert extract_tree(answer).kind == "paragraphs"
    assert forks(answer) == [
        ("Cats sleep.", " They do it all day."),
        ("\n\nDogs run.\r\n\r\nBirds fly.", " Some only walk."),
        ("\n", ""),
    ]


def test_an_interjection_is_a_root_only_with_the_next_sentence() -> None:
    answer = (
        "Sure! Cats sleep. They do it all day.\n\nOf course. Here it is:\n\n**Yes!** Dogs run. Far."
    )

    assert forks(answer) == [
        ("Sure! Cats sleep.", " They do it all day."),
        ("\n\nOf course. Here it is:\n\n**Yes!** Dogs run.", " Far."),
    ]
    assert forks("Surely. It is.\n\nNo one came. Why?")[0] == ("Surely.", " It is.")


def test_an_answer_of_one_paragraph_is_unstructured() -> None:
    assert extract_tree("Cats sleep. They do it all day.").kind == "unstructured"


@pytest.mark.parametrize(
    ("rules", "forks_with"),
    [
        (PAPER, {"two of two", "two of three", "three of three"}),
        (StructureRules(least_paragraphs=3), {"two of three", "three of three"}),
        (StructureRules(least_paragraph_forks=2), {"two of two", "two of three", "three of three"}),
        (StructureRules(least_paragraphs=3, least_paragraph_forks=3), {"three of three"}),
    ],
)
def test_paragraphs_and_their_forks_have_thresholds(
    rules: StructureRules, forks_with: set[str]
) -> None:
    whole, single = "Cats sleep. All day.", "Dogs run."
    answers = {
        "one of one": [whole],
        "two of two": [whole] * 2,
        "two of three": [whole, single, whole],
        "three of three": [whole] * 3,
    }

    forking = {
        name
        for name, paragraphs in answers.items()
        if extract_tree("\n\n".join(paragraphs), rules).kind == "paragraphs"
    }

    assert forking == forks_with
    # Lists have thresholds of their own.
    assert extract_tree(LIST, rules).kind == "ordered_list"


def test_reports_name_the_rules_that_differ_from_the_papers() -> None:
    rules = StructureRules(unordered_lists=True, least_paragraphs=3)

    assert PAPER.name == "appendix B of the paper"
    assert rules.name == "appendix B of the paper, unordered lists, least paragraphs 3"


def test_a_line_that_introduces_a_list_is_a_root() -> None:
    answer = "Take these:\n- bread\n- cheese\n\nEnjoy."

    assert forks(answer) == [("Take these:", "\n- bread\n- cheese"), ("\n\nEnjoy.", "")]


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        ("```python\nx\n```", "code block"),
        ("    def f(x):\n        pass", "code block"),
        ("int main() {", "code block"),
        ("https://example.com", "url"),
        ("[here](page.md)", "url"),
        ("| a | b |\n|---|---|\n| 1 | 2 |", "table"),
        ("<div class='x'>text</div>", "html"),
        ("$x^2$", "mathematics"),
        ("\\(a\\)", "mathematics"),
        ("x = 5", "mathematics"),
        ("3 + 4", "mathematics"),
        ("√2", "mathematics"),
    ],
)
def test_ambiguous_answers_are_unstructured_with_a_reason(piece: str, reason: str) -> None:
    extracted = extract_tree(f"{LIST}\n\n{piece}\n")

    assert (extracted.kind, extracted.reason) == ("unstructured", reason)
    assert count_forks(extracted.tree) == 0


@pytest.mark.parametrize(
    "prose",
    ["It costs $5 and $6.", "Open 24/7.", "On 10/9/2023.", "A 1/6 chance.", "x < y, a > b", "C++"],
)
def test_prose_is_not_ambiguous(prose: str) -> None:
    assert ambiguity(prose) is None


def test_bullet_points_fork_only_with_the_option() -> None:
    answer = "So:\n\n- Rest: Sleep a lot.\n- Move: Walk a lot.\n- Eat: Little sugar.\n\nBye."

    assert count_forks(extract_tree(answer).tree) == 1
    assert extract_tree(answer, UNORDERED).kind == "unordered_list"
    assert forks(answer, UNORDERED)[1] == ("\n- Move:", " Walk a lot.")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1. a\n2. b\n3. c", True),
        ("1. a\n2. b", False),
        ("- a\n- b\n- c", True),
        ("- a\n  - b\n  - c", False),
        ("```\n* a\n* b\n* c\n```", True),
        ("In 1. and 2. and 3. there is prose.", False),
    ],
)
def test_three_points_or_bullets_at_one_level_are_a_list(answer: str, expected: bool) -> None:
    assert has_list(answer) == expected


def test_headings_with_lists_fork_only_with_the_option() -> None:
    answer = "".join(f"## Day {n}\n\n- walk a little\n- sleep a lot\n\n" for n in (1, 2, 3))

    assert extract_tree(answer, UNORDERED).kind == "unordered_list"
    assert forks(answer, UNORDERED)[1] == ("\n\n## Day 2", "\n\n- walk a little\n- sleep a lot")


def test_sections_fork_below_the_headings_of_the_highest_level_with_three() -> None:
    answer = (
        "# Cats\n\nCats are small predators.\n\n"
        "## Diet\n\nThey eat meat. Fish is fine.\n\n### Treats\n\nOnly a few of them.\n\n"
        "## Habits\n\n- hunting at dawn\n- sleeping\n\nThat is all they do.\n\n"
        "## Health\nSee a vet once a year.\n\n"
        "# Dogs\n\nDogs are another matter."
    )

    assert extract_tree(answer, PAPER).kind == "paragraphs"
    assert forks(answer, UNORDERED) == [
        (
            "# Cats\n\nCats are small predators.\n\n## Diet",
            "\n\nThey eat meat. Fish is fine.\n\n### Treats\n\nOnly a few of them.",
        ),
        ("\n\n## Habits", "\n\n- hunting at dawn\n- sleeping\n\nThat is all they do."),
        ("\n\n## Health", "\nSee a vet once a year."),
        ("\n\n# Dogs\n\nDogs are another matter.", ""),
    ]


@pytest.mark.parametrize("heading", ["## Day {}", "### {}. Walking", "**Day {}**", "**{}. Walk**"])
@pytest.mark.parametrize("closing", ["Enjoy your days.", "---\n\nEnjoy your days.\n\nAsk me more."])
def test_the_closing_after_the_last_section_stays_in_the_root(heading: str, closing: str) -> None:
    both = COLONLESS.model_copy(update={"unordered_lists": True})
    rule = "\n\n---" if closing.startswith("---") else ""
    text = "\n\nWalk a little. Sleep a lot.\n\nThen eat."
    parts = [f"{heading.format(n)}{text}{rule}" for n in (1, 2, 3, 4)]
    answer = "\n\n".join([*parts, closing])

    found = forks(answer, both)

    assert [detail for _, detail in found] == [text, text, text, text, ""]
    assert found[-1][0].endswith(closing)


def test_numbered_points_below_headings_belong_to_these() -> None:
    both = COLONLESS.model_copy(update={"unordered_lists": True})
    points = "\n\n1. **Goal:** a thing to reach\n2. **Way:** how you get there"
    answer = "\n\n".join(f"### {n}. Step{points}" for n in (1, 2, 3))

    for rules in (COLONLESS, both):
        assert [detail for _, detail in forks(answer, rules)] == [points] * 3


@pytest.mark.parametrize(
    "headings",
    [
        ("Alice", "Bob", "Alice", "Bob"),
        ("Chapter 1", "Chapter 2", "Chapter 3"),
        ("Verse 1", "Bridge", "Outro"),
    ],
)
def test_parts_that_continue_each_other_are_no_sections(headings: tuple[str, ...]) -> None:
    answer = "\n\n".join(f"**{each}**\nHe walks a little." for each in headings)

    assert extract_tree(answer, UNORDERED).kind != "unordered_list"


def test_a_short_section_stays_in_the_root() -> None:
    sections = ("Serves\n4", "Parts\nflour, milk, eggs", "Steps\nmix it all", "Tip\nWait for it.")
    answer = "\n\n".join(f"## {section}" for section in sections)

    assert forks(answer, UNORDERED)[0] == ("## Serves\n4\n\n## Parts", "\nflour, milk, eggs")


def test_emphasised_lines_are_headings_of_sections() -> None:
    answer = "".join(f"**Day {n}**\nWalk a little. Sleep a lot.\n\n" for n in (1, 2, 3))

    assert extract_tree(answer, UNORDERED).kind == "unordered_list"
    assert forks(answer, UNORDERED)[1] == ("\n\n**Day 2**", "\nWalk a little. Sleep a lot.")


def test_numbered_headings_and_dashes_after_emphasis_need_no_colon() -> None:
    headings = "\n\n".join(f"### {n}. Step of it\nDo one thing. Then rest." for n in (1, 2, 3))
    dashes = "\n".join(f"{n}. **Plan it**—make a list of it all" for n in (1, 2, 3))

    assert forks(headings, COLONLESS)[1] == (
        "\n\n### 2. Step of it",
        "\nDo one thing. Then rest.",
    )
    bullets = "\n".join("- **Plan it** – make a list of it all" for _ in range(3))
    both = COLONLESS.model_copy(update={"unordered_lists": True})

    assert forks(bullets, UNORDERED) == [(bullets, "")]
    assert forks(bullets, both)[1] == ("\n- **Plan it** –", " make a list of it all")
    assert forks(dashes, COLONLESS)[1] == ("\n2. **Plan it**—", "make a list of it all")


def test_points_without_a_colon_fork_after_a_dash_or_their_first_sentence_if_chosen() -> None:
    answer = (
        "Four tips:\n\n"
        "1. **Rest** - Sleep eight hours a night - or nine.\n"
        "2. Walk every day. Half an hour is enough.\n"
        "3. **Eat fruit**\n   - apples, two a day\n"
        "4. Move: Walk for half an hour.\n"
        "5. Never give up.\n\n"
        "Good luck with it. You will need it."
    )

    assert extract_tree(answer, PAPER).kind == "paragraphs"
    assert extract_tree(answer, COLONLESS).kind == "ordered_list"
    assert forks(answer, COLONLESS) == [
        ("Four tips:\n\n1. **Rest** -", " Sleep eight hours a night - or nine."),
        ("\n2. Walk every day.", " Half an hour is enough."),
        ("\n3. **Eat fruit**", "\n   - apples, two a day"),
        ("\n4. Move:", " Walk for half an hour."),
        ("\n5. Never give up.\n\nGood luck with it. You will need it.", ""),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        "1. Sleep well.\n2. Walk.\n3. Eat fruit.\n\nThat is all. Good luck with it.",
        # Fewer than three points have a detail.
        "1. Sleep. Eight hours are enough.\n2. Walk. Half an hour is enough.\n3. Eat fruit.",
        "\n".join(f"{n}. Sleep 8 - 10 hours and more" for n in (1, 2, 3)),
        "\n".join(f"{n}. A well-known one of them all" for n in (1, 2, 3)),
        "\n".join(f"{n}. - degrees that are too cold" for n in (1, 2, 3)),
        "\n".join(f"{n}. Stir what is in the pot\n   until the sauce is thick" for n in (1, 2, 3)),
    ],
)
def test_points_without_colon_and_details_do_not_fork(answer: str) -> None:
    assert extract_tree(answer, COLONLESS).kind != "ordered_list"


@pytest.mark.parametrize(
    "last",
    ["Never give up. Ever.", "**Have fun**", "**Have fun**\n\nGood luck with it. You need it."],
)
def test_points_without_colon_that_have_no_detail_leave_the_list_as_it_is(last: str) -> None:
    answer = f"{LIST.partition('   -')[0]} less sugar.\n4. {last}"

    assert extract_tree(answer, COLONLESS) == extract_tree(answer, PAPER)
    assert extract_tree(answer, PAPER).kind == "ordered_list"


def test_the_first_sentence_may_end_before_a_dash() -> None:
    answer = "\n".join(f"{n}. Walk every day. Half an hour - or more - is fine." for n in (1, 2, 3))

    assert forks(answer, COLONLESS)[0] == (
        "1. Walk every day.",
        " Half an hour - or more - is fine.",
    )


PIECES = st.sampled_from(
    '1. |2. |3. |10) |Root:|: |：|\n|\r\n|\n\n|\r|\t|   |- |* |## |**|A sentence. |Dr. |“|”|"|。|('
    "|)|some words here | - |\u2028|\x00|\x0b|\x85|\ud800|\ufeff|é|| ".split("|")
)


@settings(max_examples=num_examples(600), deadline=None)
@given(
    st.one_of(st.text(st.characters(), max_size=200), st.lists(PIECES, max_size=60).map("".join)),
    st.builds(StructureRules, unordered_lists=st.booleans(), points_without_colon=st.booleans()),
)
def test_the_tree_of_any_text_restores_it(answer: str, rules: StructureRules) -> None:
    extracted = extract_tree(answer, rules)

    assert flat_text(extracted.tree) == answer
    assert (count_forks(extracted.tree) > 0) == (extracted.kind != "unstructured")
    assert (extracted.reason is None) == (extracted.kind != "unstructured")
    if extract_tree(answer, PAPER).kind == "ordered_list":
        assert count_forks(extracted.tree) >= count_forks(extract_tree(answer, PAPER).tree)


def test_many_points_do_not_exceed_the_recursion_limit() -> None:
    answer = "\n".join(f"{n}. Point: with content {n}" for n in range(1, 900))

    tree: ParagraphRecord = extract_tree(answer).tree

    assert count_forks(tree) == 899
    assert flat_text(tree) == answer


# In quadratic time, each of these would take an hour or more.
@pytest.mark.parametrize("unit", [" ", "\u00a0", "[", "[a](", '"', "(", "<a ", "|", "\n", "2. "])
@pytest.mark.parametrize("start", ["", "# ", "a.\n\n"])
def test_the_time_is_linear_in_the_answer(start: str, unit: str) -> None:
    answer = start + unit * (1_000_000 // len(unit)) + ". end"

    extracted = extract_tree(
        answer, StructureRules(unordered_lists=True, points_without_colon=True)
    )

    assert flat_text(extracted.tree) == answer


@pytest.mark.parametrize(
    "thought",
    [
        "<think>\nThree, or `<b>` two?\n\n1. Rest: maybe.\n2. Move.\n3. Eat: what?\n</think>\n\n",
        "<think></think>",
        # If the prompt opens the thought, the server returns only the rest of it.
        "Three, or $x^2$?\n</think>\n\n",
    ],
)
def test_a_thought_is_kept_whole_and_does_not_affect_the_structure(
    thought: str,
) -> None:
    extracted = extract_tree(thought + LIST)

    assert (extracted.kind, extracted.reason) == ("ordered_list", None)
    assert flat_text(extracted.tree) == thought + LIST
    (first, *others), expected = forks(thought + LIST), forks(LIST)
    assert [(first[0].removeprefix(thought), first[1]), *others] == expected
    assert first[0].startswith(thought)


def test_a_thought_without_an_end_or_an_answer_is_not_split() -> None:
    for answer in (f"<think>{LIST}", f"<think>{LIST}</think>\n"):
        extracted = extract_tree(answer)

        assert (extracted.kind, count_forks(extracted.tree)) == ("unstructured", 0)
        assert flat_text(extracted.tree) == answer


def test_prose_that_mentions_the_marker_is_not_a_thought() -> None:
    extracted = extract_tree(f"The tag `</think>` ends it.\n\n{LIST}")

    assert (extracted.kind, extracted.reason) == ("unstructured", "html")
