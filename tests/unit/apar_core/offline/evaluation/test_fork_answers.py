"""Places of forks, the rules' places in the same text, and repeated items, on made answers."""

from __future__ import annotations

from typing import Any

import pytest

from apar_core.offline.data.records import ParagraphRecord, chain, flat_text, token_tree
from apar_core.offline.data.structure import StructureRules
from apar_core.offline.evaluation.fork_answers import (
    ForkAnswer,
    ForkFacts,
    KindCounts,
    fork_facts,
    kind_counts,
    num_repeated,
    text_rules,
)

PAPER = StructureRules()
LIST = chain(
    [
        ("Sure.\n\n1. Tune first:", ParagraphRecord(" Check every string.")),
        ("\n2. Play songs:", ParagraphRecord(" Pick songs you like.")),
        ("\n3. Rest:", ParagraphRecord(" Sore fingers need a day.")),
    ],
    "\n\nGood luck!",
)


def answer(record: ParagraphRecord, **changed: Any) -> ForkAnswer:
    """Return an answer that a model wrote with these forks, one token a character."""
    facts = fork_facts(token_tree(record, lambda text: [ord(c) for c in text]), decode)
    threads = {str(number): [1] for number in range(len(facts.places))}
    values = {
        "source": "model",
        "question_id": "1",
        "category": "any",
        "prompt_ids": [1],
        "text": flat_text(record),
        "token_ids": [1, 2],
        "threads": {"": [1], **threads},
        "finish_reason": "stop",
        "statistics": {},
        "num_unended": 0,
        "misplaced": None,
        **facts._asdict(),
    }
    return ForkAnswer(**{**values, **changed})


def decode(token_ids: Any) -> str:
    return "".join(map(chr, token_ids))


def test_a_fork_has_the_place_of_the_text_before_it() -> None:
    tree = token_tree(LIST, lambda text: [ord(c) for c in text])

    facts = fork_facts(tree, decode)

    # "Sure.1.Tunefirst:" has 17 characters that are no space.
    assert facts.places[0] == 17
    assert facts.heads == ("1. Tune first:", "2. Play songs:", "3. Rest:")
    assert facts.details[2] == " Sore fingers need a day."


def test_nested_forks_are_read_in_the_order_of_the_text() -> None:
    inner = chain([("a:", ParagraphRecord("b"))], "c")
    tree = token_tree(chain([("1:", inner)], "2"), lambda text: [ord(c) for c in text])

    facts = fork_facts(tree, decode)

    assert facts.places == (2, 4)
    assert facts.details == ("a:bc", "b")


def test_the_rules_find_the_places_of_a_model_that_learned_them() -> None:
    rules = text_rules(flat_text(LIST), PAPER)

    assert rules.kind == "ordered_list"
    assert rules.forks == fork_facts(token_tree(LIST, lambda t: [ord(c) for c in t]), decode)


@pytest.mark.parametrize("space", [" ", "\n", "\n\n  "])
def test_white_space_at_a_fork_does_not_count(space: str) -> None:
    shifted = chain(
        [
            (f"1. Tune first:{space}", ParagraphRecord("Check every string.")),
            ("\n2. Play songs:", ParagraphRecord(" Pick songs you like.\n")),
            ("3. Rest:", ParagraphRecord(" Sore fingers need a day.")),
        ]
    )

    [counts] = kind_counts([answer(shifted)], PAPER)

    assert counts.places == counts.rule_places == counts.common == 3


def test_forks_are_compared_with_the_rules_by_kind() -> None:
    stray = chain([("Tune your guitar", ParagraphRecord(" and play it every day."))])
    unforked = ParagraphRecord(flat_text(LIST))
    late = chain(
        [
            ("1. Tune first: Check", ParagraphRecord(" every string.")),
            ("\n2. Play songs:", ParagraphRecord(" Pick songs you like.")),
        ],
        "\n3. Rest: Sore fingers need a day.",
    )

    counts = kind_counts([answer(LIST), answer(unforked), answer(late), answer(stray)], PAPER)

    assert counts == [
        # Of nine places of the rules the model has three and one, and forks once elsewhere.
        KindCounts("ordered_list", answers=3, forked=2, places=5, rule_places=9, common=4),
        KindCounts("unstructured", answers=1, forked=1, places=1, rule_places=0, common=0),
    ]
    assert [each.should_fork for each in counts] == [True, False]


def test_items_are_repeated_if_their_words_are_the_same() -> None:
    facts = ForkFacts(
        (1, 2, 3, 4),
        ("1. **Tune first**:", "2. Tune, first:", "3. Rest:", ""),
        ("Check it.", "Play.", " play!", ""),
    )

    # One head, one detail; what has no words is no item.
    assert num_repeated(facts) == 2
    assert num_repeated(ForkFacts((), (), ())) == 0


def test_numbers_are_the_only_difference_of_points_that_is_ignored() -> None:
    facts = ForkFacts((1, 2), ("1. Use 2 cups:", "2. Use 3 cups:"), ("a", "b"))

    assert num_repeated(facts) == 0


def test_items_without_forks_are_those_of_the_rules() -> None:
    text = "1. Tune: Check every string.\n2. Play: Check every string.\n3. Rest: For a whole day."
    alone = answer(ParagraphRecord(text))

    assert not alone.forked
    assert alone.items(PAPER).heads == ("1. Tune:", "2. Play:", "3. Rest:")
    assert num_repeated(alone.items(PAPER)) == 1


def test_an_answer_is_cut_if_any_of_its_threads_is() -> None:
    assert answer(LIST, finish_reason="length").is_cut
    assert answer(LIST, num_unended=1).is_cut
    assert not answer(LIST).is_cut
