"""Seeded draws from two groups of rows."""

from __future__ import annotations

from collections import Counter

import pytest

from apar_core.data.records import ParagraphRecord
from apar_core.errors import TrainingError
from apar_core.training.packing import PackedTree
from apar_core.training.recipe import TrainingRecipe
from apar_core.training.tree_dataset import RowList, TreeGroups, drawn_rows
from tests.unit.apar_core.training.random_trees import packed

GROUPS = TreeGroups(
    [packed("a", ParagraphRecord("b" * n)) for n in range(1, 21)],
    [packed("c", ParagraphRecord("d" * n)) for n in range(1, 11)],
)


def draw(groups: TreeGroups = GROUPS, *, share: float = 0.5, seed: int = 0) -> list[PackedTree]:
    recipe = TrainingRecipe(
        num_steps=40, batch_size=10, structured_share=share, seed=seed, learning_rate=1.0
    )
    rows: RowList = drawn_rows(groups, recipe)
    return [rows[index] for index in range(len(rows))]


def test_half_of_the_draws_come_from_each_group_whatever_their_sizes() -> None:
    drawn = draw()

    structured = sum(any(row is known for known in GROUPS.structured) for row in drawn)
    assert len(drawn) == 400
    assert structured / 400 == pytest.approx(0.5, abs=0.07)


def test_a_group_is_used_up_before_it_is_gone_through_again() -> None:
    counts = Counter(id(row) for row in draw(share=1.0))

    assert set(counts.values()) == {20}
    assert set(Counter(id(row) for row in draw(share=0.0)).values()) == {40}


def test_draws_depend_on_the_seed_alone_and_batches_are_sorted_by_length() -> None:
    drawn = draw()

    assert draw() == drawn
    assert draw(seed=1) != drawn
    batch = [len(row.token_ids) for row in drawn[:10]]
    assert batch == sorted(batch)


def test_an_empty_group_is_refused_unless_nothing_is_drawn_from_it() -> None:
    forkless = TreeGroups([], GROUPS.unstructured)

    with pytest.raises(TrainingError, match=r"structured_share 0\.5 needs structured examples"):
        draw(forkless)
    assert len(draw(forkless, share=0.0)) == 400


def test_both_groups_give_their_share_to_validation() -> None:
    training, validation = GROUPS.split(0.2, seed=0)

    assert (len(training.structured), len(training.unstructured)) == (16, 8)
    assert (len(validation.structured), len(validation.unstructured)) == (4, 2)
    assert not {id(r) for r in training.all_rows} & {id(r) for r in validation.all_rows}
    assert GROUPS.split(0.2, seed=0) == (training, validation)
    assert GROUPS.split(0.2, seed=1) != (training, validation)
