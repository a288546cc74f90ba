"""Answers as paragraph trees and token trees."""

from __future__ import annotations

import pytest

from apar_core.errors import TreeError
from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.data.records import (
    ParagraphRecord,
    chain,
    count_forks,
    flat_text,
    token_tree,
)
from apar_core.tree import restore
from apar_core.tree.threads import thread_scripts


def test_text_is_read_as_root_then_first_child_then_next_sibling() -> None:
    inner = chain([(" lead", ParagraphRecord(" deep"))], closing=" inner end")
    answer = chain([("1.", inner), ("\n2.", ParagraphRecord(" b"))], closing="\nend")

    assert flat_text(answer) == "1. lead deep inner end\n2. b\nend"
    assert count_forks(answer) == 3


def test_an_answer_without_forks_is_its_text() -> None:
    assert flat_text(ParagraphRecord("42")) == "42"
    assert count_forks(ParagraphRecord("42")) == 0


def test_a_next_sibling_without_a_fork_before_it_is_refused() -> None:
    with pytest.raises(TreeError, match="next sibling"):
        ParagraphRecord("a", next_sibling=ParagraphRecord("b"))


def test_a_fork_right_after_another_is_refused() -> None:
    with pytest.raises(TreeError, match="two forks"):
        ParagraphRecord("", first_child=ParagraphRecord("detail"))
    with pytest.raises(TreeError, match="is empty"):
        ParagraphRecord("root", first_child=ParagraphRecord(""))


def test_a_chain_without_paragraphs_is_refused() -> None:
    with pytest.raises(TreeError, match="at least one"):
        chain([])


TOKENS = TreeTokens(fork_id=-1, child_id=-2, end_id=-3)
INNER = chain([("c", ParagraphRecord("dd"))], closing="e")
ANSWER = chain([("a", ParagraphRecord("bb")), ("f", INNER)], closing="g")


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_the_tree_restores_to_the_answer_and_every_thread_ends() -> None:
    tree = token_tree(ANSWER, encode)

    assert restore(tree) == encode("abbfcddeg")
    assert [record.depth for record in tree.threads.values()] == [0, 1, 1, 2]
    assert all(record.ended for record in tree.threads.values())


def test_the_script_of_a_thread_includes_fork_and_end_tokens() -> None:
    assert thread_scripts(token_tree(ANSWER, encode), TOKENS.fork_id, TOKENS.end_id) == {
        "": [ord("a"), -1, ord("f"), -1, ord("g"), -3],
        "0": [*encode("bb"), -3],
        "1": [ord("c"), -1, ord("e"), -3],
        "1.0": [*encode("dd"), -3],
    }
