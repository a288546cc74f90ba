"""Which tree is learned when: seeded draws from forking and from plain answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.utils.data import Dataset

from apar_core.errors import TrainingError
from apar_core.training.packing import PackedTree
from apar_core.training.recipe import TrainingRecipe


@dataclass(frozen=True, slots=True)
class TreeGroups:
    """Packed rows of forking and of plain answers."""

    structured: Sequence[PackedTree]
    unstructured: Sequence[PackedTree]

    def split(self, validation_share: float, seed: int) -> tuple[TreeGroups, TreeGroups]:
        """Return what to train on and what to validate with; both groups give their share."""
        structured = _split(self.structured, validation_share, f"{seed}:structured")
        unstructured = _split(self.unstructured, validation_share, f"{seed}:unstructured")
        return (
            TreeGroups(structured[0], unstructured[0]),
            TreeGroups(structured[1], unstructured[1]),
        )

    @property
    def all_rows(self) -> list[PackedTree]:
        """Every row, forking answers first."""
        return [*self.structured, *self.unstructured]


def _split(
    rows: Sequence[PackedTree], share: float, seed: str
) -> tuple[list[PackedTree], list[PackedTree]]:
    num_validation = round(len(rows) * share)
    chosen = set(random.Random(seed).sample(range(len(rows)), num_validation))
    kept = [row for index, row in enumerate(rows) if index not in chosen]
    return kept, [rows[index] for index in sorted(chosen)]


class RowList(Dataset[PackedTree]):
    """Rows in a fixed order."""

    def __init__(self, rows: Sequence[PackedTree]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PackedTree:
        return self.rows[index]


def drawn_rows(groups: TreeGroups, recipe: TrainingRecipe) -> RowList:
    """Return the rows of a whole run, in order; the same recipe gives the same ones.

    Each draw takes a forking answer with the given probability. A group is gone through in random
    order, and again in another order when it is used up. Within a batch rows of like length stand
    together: the batch's gradient does not depend on their order, and little is padded.
    Raises TrainingError if the draws ask for a group that is empty.
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
                f"structured_share {recipe.structured_share} needs {name} examples, and there are "
                "none"
            )
    drawn: list[PackedTree] = []
    for _ in range(recipe.num_steps):
        batch = [
            next(endless[rng.random() < recipe.structured_share]) for _ in range(recipe.batch_size)
        ]
        drawn += sorted(batch, key=lambda row: len(row.token_ids))
    return RowList(drawn)


def _endless(rows: Sequence[PackedTree], rng: random.Random) -> Iterator[PackedTree]:
    while rows:
        order = list(range(len(rows)))
        rng.shuffle(order)
        yield from (rows[index] for index in order)
