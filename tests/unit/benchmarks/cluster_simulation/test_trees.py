"""Recorded answers as threads."""

from pathlib import Path

import pytest

from apar_core.offline.data.records import ParagraphRecord
from benchmarks.cluster_simulation.choosers import attended_tokens
from benchmarks.cluster_simulation.trees import AnswerTree, ThreadPlan, answer_tree, read_trees


def text(tokens: int) -> str:
    return "a" * int(4.2 * tokens)


def test_forks_and_ends_are_tokens_and_text_is_what_is_read() -> None:
    last = ParagraphRecord(text(5))
    second = ParagraphRecord(text(20), ParagraphRecord(text(40)), last)
    first = ParagraphRecord(text(10), ParagraphRecord(text(30)), second)

    tree = answer_tree(first)

    # 10 words and a fork, 20 and a fork, 5 and the end.
    assert tree.threads == (
        ThreadPlan(38, ((11, 1), (32, 2))),
        ThreadPlan(31),
        ThreadPlan(41),
    )
    assert tree.text_tokens == 105
    assert tree.generated_tokens == 110
    assert tree.spans() == [(0, 38), (11, 42), (32, 73)]
    assert tree.critical_steps == 73


def test_without_forks_the_same_text_is_one_thread() -> None:
    tree = AnswerTree((ThreadPlan(12, ((5, 1),)), ThreadPlan(9)), text_tokens=18)

    assert tree.without_forks().threads == (ThreadPlan(19),)


def test_a_child_attends_to_its_parents_beginning() -> None:
    tree = AnswerTree((ThreadPlan(4, ((2, 1),)), ThreadPlan(3)), text_tokens=4)

    # Root: rows of 11, 12, 13 tokens. Child: 10 + 2 tokens and its own first, then 14 and 15.
    assert attended_tokens(tree, prompt_tokens=10) == 11 + 12 + 13 + 14 + 15


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"mixed\.jsonl"):
        read_trees([tmp_path / "mixed.jsonl"])
