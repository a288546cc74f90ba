"""Rows of a training run: seeded draws of trees, packed into rows or one tree per row."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.utils.data import Dataset

from apar_core.errors import TrainingError
from apar_core.offline.training.packing import PackedTree, join_trees, padded_width
from apar_core.offline.training.recipe import TrainingRecipe


@dataclass(frozen=True, slots=True)
class TreeGroups:
    """Trees of structured (forking) and unstructured answers."""

    structured: Sequence[PackedTree]
    unstructured: Sequence[PackedTree]

    def split(self, validation_share: float, seed: int) -> tuple[TreeGroups, TreeGroups]:
        """Split both groups into trees for training and for validation."""
        structured = _split(self.structured, validation_share, f"{seed}:structured")
        unstructured = _split(self.unstructured, validation_share, f"{seed}:unstructured")
        return (
            TreeGroups(structured[0], unstructured[0]),
            TreeGroups(structured[1], unstructured[1]),
        )

    @property
    def all_rows(self) -> list[PackedTree]:
        """All trees, structured ones first."""
        return [*self.structured, *self.unstructured]


def _split(
    rows: Sequence[PackedTree], share: float, seed: str
) -> tuple[list[PackedTree], list[PackedTree]]:
    num_validation = round(len(rows) * share)
    chosen = set(random.Random(seed).sample(range(len(rows)), num_validation))
    kept = [row for index, row in enumerate(rows) if index not in chosen]
    return kept, [rows[index] for index in sorted(chosen)]


class RowList(Dataset[PackedTree]):
    """Rows in a fixed order, each given by its trees.

    Rows are joined when they are read, so drawing a tree again takes no memory.
    """

    def __init__(self, rows: Sequence[Sequence[PackedTree]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PackedTree:
        return join_trees(self.rows[index])

    def padded(self, multiple: int) -> RowList:
        """Append empty rows up to a multiple of a number.

        Then each process runs the model the same number of times, as collective operations require.
        Empty rows have no targets, so they do not change the loss.
        """
        return RowList(padded_rows(self.rows, multiple))


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of a run, and the forward passes of each process per step."""

    rows: RowList
    passes_per_step: int


def padded_rows(rows: Sequence[Sequence[PackedTree]], multiple: int) -> list[Sequence[PackedTree]]:
    """Append empty rows up to a multiple of a number."""
    return [*rows, *[()] * (-len(rows) % multiple)]


def drawn_trees(groups: TreeGroups, recipe: TrainingRecipe) -> list[list[PackedTree]]:
    """Draw the trees of each step of a run, seeded by the recipe.

    Each draw takes a structured tree with the recipe's probability, which is lower if sequences are
    counted, so that structured trees have this share of them. A group is drawn in random
    order without replacement, then shuffled again. Trees of a step are sorted by length to reduce
    padding, which does not change its gradient. Raises TrainingError if a group is needed but
    empty.
    """
    rng = random.Random(f"{recipe.seed}:draws")
    endless = {
        True: _endless(groups.structured, rng),
        False: _endless(groups.unstructured, rng),
    }
    for structured, rows, share in (
        (True, groups.structured, recipe.structured_share),
        (False, groups.unstructured, 1 - recipe.structured_share),
    ):
        if share > 0 and not rows:
            name = "structured" if structured else "unstructured"
            raise TrainingError(
                f"structured_share {recipe.structured_share} needs {name} examples, but there are "
                "none"
            )
    counts_trees = recipe.batch_unit == "trees"
    share = recipe.structured_share
    if not counts_trees and 0 < share < 1:
        mean_sequences = [
            statistics.fmean(tree.num_sequences for tree in group)
            for group in (groups.structured, groups.unstructured)
        ]
        trees = share / mean_sequences[0], (1 - share) / mean_sequences[1]
        share = trees[0] / sum(trees)
    steps = []
    for _ in range(recipe.num_steps):
        batch: list[PackedTree] = []
        missing = recipe.batch_size
        while missing > 0:
            batch.append(next(endless[rng.random() < share]))
            missing -= 1 if counts_trees else batch[-1].num_sequences
        steps.append(sorted(batch, key=_length))
    return steps


def _endless(rows: Sequence[PackedTree], rng: random.Random) -> Iterator[PackedTree]:
    while rows:
        order = list(range(len(rows)))
        rng.shuffle(order)
        yield from (rows[index] for index in order)


def step_rows(
    steps: Sequence[Sequence[PackedTree]], recipe: TrainingRecipe, num_processes: int
) -> StepRows:
    """Return the rows of all steps, each padded to the number of rows of the largest step.

    The Trainer accumulates over a constant number of passes, but packed rows differ in number.
    """
    at_once = recipe.micro_batch_size * num_processes
    filled = [rows_of(step, recipe) for step in steps]
    passes = max(-(-len(rows) // at_once) for rows in filled)
    every_step = [row for rows in filled for row in padded_rows(rows, passes * at_once)]
    return StepRows(RowList(every_step), passes)


def rows_of(trees: Sequence[PackedTree], recipe: TrainingRecipe) -> list[list[PackedTree]]:
    """Assign trees to rows: one each, or packed by first-fit decreasing."""
    if not recipe.pack_trees:
        return [[tree] for tree in trees]
    rows: list[list[PackedTree]] = []
    room: list[int] = []
    for tree in sorted(trees, key=_length, reverse=True):
        length = _length(tree)
        row = next((row for row, left in enumerate(room) if left >= length), None)
        if row is None:
            rows.append([])
            room.append(recipe.context_length)
            row = len(rows) - 1
        rows[row].append(tree)
        room[row] -= length
    return sorted(rows, key=_num_tokens)


def padding_share(rows: RowList, recipe: TrainingRecipe, multiple: int) -> float:
    """Return the share of padding among the tokens that the model processes.

    Rows are padded to the longest row of their micro-batch and to a `multiple` of tokens.
    """
    lengths = [_num_tokens(row) for row in rows.rows]
    size = recipe.micro_batch_size
    batches = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    num_processed = sum(len(batch) * padded_width(batch, multiple) for batch in batches)
    return 1 - sum(lengths) / num_processed


def _num_tokens(row: Sequence[PackedTree]) -> int:
    return sum(map(_length, row))


def _length(tree: PackedTree) -> int:
    return len(tree.token_ids)
