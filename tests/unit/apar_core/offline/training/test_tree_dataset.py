"""Seeded draws, packing into rows, and padding."""

from __future__ import annotations

from collections import Counter

import pytest

from apar_core.errors import TrainingError
from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.training.packing import PackedTree
from apar_core.offline.training.recipe import TrainingRecipe
from apar_core.offline.training.tree_dataset import (
    RowList,
    TreeGroups,
    drawn_trees,
    padding_share,
    rows_of,
    step_rows,
)
from tests.unit.apar_core.offline.training.random_trees import packed

GROUPS = TreeGroups(
    [packed("a", ParagraphRecord("b" * n)) for n in range(1, 21)],
    [packed("c", ParagraphRecord("d" * n)) for n in range(1, 11)],
)


def draw(groups: TreeGroups = GROUPS, *, share: float = 0.5, seed: int = 0) -> list[PackedTree]:
    recipe = TrainingRecipe(
        num_steps=40, batch_size=10, structured_share=share, seed=seed, learning_rate=1.0
    )
    steps = drawn_trees(groups, recipe)
    assert {len(step) for step in steps} == {recipe.batch_size}
    return [tree for step in steps for tree in step]


def test_half_of_the_draws_come_from_each_group_whatever_their_sizes() -> None:
    drawn = draw()

    structured = sum(any(row is known for known in GROUPS.structured) for row in drawn)
    assert len(drawn) == 400
    assert structured / 400 == pytest.approx(0.5, abs=0.07)


def test_a_group_is_drawn_without_replacement_until_used_up() -> None:
    counts = Counter(id(row) for row in draw(share=1.0))

    assert set(counts.values()) == {20}
    assert set(Counter(id(row) for row in draw(share=0.0)).values()) == {40}


def test_draws_depend_only_on_the_seed_and_batches_are_sorted_by_length() -> None:
    drawn = draw()

    assert draw() == drawn
    assert draw(seed=1) != drawn
    batch = [len(row.token_ids) for row in drawn[:10]]
    assert batch == sorted(batch)


def test_sequences_of_threads_count_instead_of_trees() -> None:
    detail = ParagraphRecord("b")
    forking = [
        packed("a", chain([("b", detail)] * forks, closing="b")) for forks in (1, 2, 3, 8, 11)
    ]
    groups = TreeGroups(forking, GROUPS.unstructured)
    recipe = TrainingRecipe(num_steps=200, batch_size=60, batch_unit="sequences", learning_rate=1.0)

    steps = drawn_trees(groups, recipe)

    assert [tree.num_sequences for tree in forking] == [2, 3, 4, 9, 12]
    sizes = [[tree.num_sequences for tree in step] for step in steps]
    # A step takes whole trees, so it has at most the threads of one tree more.
    assert all(60 <= sum(step) < 72 for step in sizes)
    threads = [size for step in sizes for size in step]
    assert sum(size for size in threads if size > 1) / sum(threads) == pytest.approx(0.5, abs=0.03)


def test_an_empty_group_is_refused_if_it_is_drawn_from() -> None:
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


def lengths(rows: list[list[PackedTree]]) -> list[list[int]]:
    return [[len(tree.token_ids) for tree in row] for row in rows]


def tree_of(num_tokens: int) -> PackedTree:
    # A prompt of one token, the answer, and its end.
    return packed("a", ParagraphRecord("b" * (num_tokens - 2)))


def recipe_of(**fields: int | bool) -> TrainingRecipe:
    return TrainingRecipe.model_validate(
        {"num_steps": 2, "batch_size": 5, "learning_rate": 1.0, "context_length": 10} | fields
    )


def test_trees_fill_rows_of_the_context_length_by_first_fit_decreasing() -> None:
    trees = [tree_of(length) for length in (3, 4, 4, 6, 10, 3)]

    assert lengths(rows_of(trees, recipe_of(pack_trees=True))) == [[10], [6, 4], [4, 3, 3]]
    assert lengths(rows_of(trees, recipe_of())) == [[3], [4], [4], [6], [10], [3]]


def test_all_steps_have_the_passes_of_the_longest_one() -> None:
    steps = [[tree_of(10), tree_of(9), tree_of(8)], [tree_of(5), tree_of(5), tree_of(5)]]

    plan = step_rows(steps, recipe_of(pack_trees=True), num_processes=2)

    assert plan.passes_per_step == 2
    tokens = [len(plan.rows[index].token_ids) for index in range(len(plan.rows))]
    assert tokens == [8, 9, 10, 0, 5, 10, 0, 0]


def test_empty_rows_fill_the_batches_of_all_processes() -> None:
    rows = RowList([[tree_of(4)] for _ in range(3)]).padded(4)

    assert [len(rows[index].token_ids) for index in range(len(rows))] == [4, 4, 4, 0]
    assert len(RowList(rows.rows).padded(4)) == 4
    assert RowList([]).padded(4).rows == []


def test_the_share_of_padding_counts_all_processed_tokens() -> None:
    rows = RowList([[tree_of(4)], [tree_of(8)], [tree_of(3), tree_of(3)], []])

    # Two rows of 8 with 12 tokens, two of 6 with 6; alone, an empty row is one token.
    assert padding_share(rows, recipe_of(micro_batch_size=2), 1) == pytest.approx(10 / 28)
    assert padding_share(rows, recipe_of(), 1) == pytest.approx(1 / 19)
    assert padding_share(rows, recipe_of(), 8) == pytest.approx(14 / 32)
