"""Answers as trees of paragraphs."""

import pytest

from apar_core.errors import TreeError
from apar_core.offline.data.records import ParagraphRecord, chain, count_forks, flat_text


def test_text_is_read_as_root_then_first_child_then_next_sibling() -> None:
    inner = chain([(" lead", ParagraphRecord(" deep"))], closing=" inner end")
    answer = chain([("1.", inner), ("\n2.", ParagraphRecord(" b"))], closing="\nend")

    assert flat_text(answer) == "1. lead deep inner end\n2. b\nend"
    assert count_forks(answer) == 3


def test_an_answer_without_forks_is_its_own_text() -> None:
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
