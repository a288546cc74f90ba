"""Acceptance table: how often the candidates of prompt tokens or Medusa heads are right.

Candidate trees are built from it, and it predicts the tokens per step of a tree. It lies beside the
weights that it was measured with. Source: Parallel Prompt Decoding (arXiv 2405.18628), section 4.2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from apar_core.errors import CheckpointError, validation_summary

ACCEPTANCE_FILE = "acceptance.json"

STARTING_PLACES = 20
"""Places of an answer that count for the paper's accuracies ("20 steps", tables 2 to 8)."""

# Ten ratios of counts may add up to a little more than 1.
_ROUNDING = 1e-6


class AcceptanceTable(BaseModel):
    """Acceptance probability by distance and rank.

    `probabilities[d][k]` belongs to the token at distance d + 1 after the model's own next token.
    It is the probability that this token is the candidate of rank k; rank 0 is the likeliest. Only
    steps count in which all tokens before it were among their candidates: `observations[d]` of
    them. `accuracy[d][k]` is the share of all places where the token is among the first k + 1
    candidates, whatever the tokens before; `accuracy_at_start` counts only the first
    `STARTING_PLACES` of a thread. All three are None if unknown.
    `source` says which weights and prompts were measured. Construction raises pydantic's
    ValidationError.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    probabilities: tuple[tuple[float, ...], ...] = Field(min_length=1)
    observations: tuple[int, ...] | None = None
    accuracy: tuple[tuple[float, ...], ...] | None = None
    accuracy_at_start: tuple[tuple[float, ...], ...] | None = None
    source: str = ""

    @field_validator("probabilities")
    @classmethod
    def _check_rows(cls, rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        for distance, row in enumerate(rows, 1):
            if not row or len(row) != len(rows[0]):
                raise ValueError(
                    f"distance {distance} has {len(row)} ranks, distance 1 has {len(rows[0])}"
                )
            if not all(0 <= probability <= 1 for probability in row):
                raise ValueError(f"distance {distance} has a probability outside 0 to 1")
            if sum(row) > 1 + _ROUNDING:
                raise ValueError(f"distance {distance} adds up to {sum(row):.6f}, more than 1")
        return rows

    @model_validator(mode="after")
    def _check_observations(self) -> Self:
        if self.observations is None:
            return self
        if len(self.observations) != self.num_distances or min(self.observations) < 1:
            raise ValueError(
                f"observations must have a positive number for each of {self.num_distances} "
                f"distances, not {self.observations}"
            )
        return self

    @classmethod
    def from_counts(
        cls, hits: Sequence[Sequence[int]], observations: Sequence[int], source: str = ""
    ) -> Self:
        """Return the table of `hits[d][k]` right candidates at `observations[d]` positions."""
        rows = tuple(
            tuple(count / positions for count in row)
            for row, positions in zip(hits, observations, strict=True)
        )
        return cls(probabilities=rows, observations=tuple(observations), source=source)

    @property
    def num_distances(self) -> int:
        """Distances M that are predicted: prompt tokens of a chain, or Medusa heads."""
        return len(self.probabilities)

    @property
    def num_ranks(self) -> int:
        """Candidates K of each distance."""
        return len(self.probabilities[0])

    def top_k(self) -> tuple[tuple[float, ...], ...]:
        """Return the probability that one of the first k + 1 candidates is right ("top-k")."""
        return tuple(tuple(accumulate(row)) for row in self.probabilities)

    def write(self, folder: str | Path) -> Path:
        """Write `acceptance.json` into a folder; return its path."""
        path = Path(folder) / ACCEPTANCE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.model_dump(), indent=1) + "\n", encoding="utf-8")
        return path


def read_table(folder: str | Path) -> AcceptanceTable:
    """Read the acceptance table beside prompt tokens or Medusa heads.

    Raises CheckpointError for a missing or damaged file, naming the field that is wrong.
    """
    path = Path(folder) / ACCEPTANCE_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"no acceptance table in {path}: {error}. `apar evaluate acceptance` measures it"
        ) from error
    try:
        return AcceptanceTable.model_validate_json(text)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {validation_summary(error)}") from error


def _published_table(
    model: str, *rows: Sequence[float], before: Sequence[float]
) -> AcceptanceTable:
    """Return the table of the candidates [k], [0, k] and [0, 0, k] of published trees.

    `rows` have the probabilities of their paths, `before` those of the paths before them.
    """
    return AcceptanceTable(
        probabilities=tuple(
            tuple(path / first for path in (*row, *(0.0,) * (len(rows[0]) - len(row))))
            for row, first in zip(rows, before, strict=True)
        ),
        source=f"published candidate trees of {model}, "
        "github.com/hmarkc/parallel-prompt-decoding (5305d9f)",
    )


VICUNA_7B = _published_table(
    "Vicuna-7B",
    (0.48335, 0.14342, 0.0736, 0.0454, 0.03087, 0.02155, 0.01658, 0.01323, 0.00932, 0.00845),
    (0.12691, 0.07038, 0.03922, 0.02784, 0.0207, 0.01561, 0.01242, 0.0104, 0.0092, 0.00749),
    (0.02083, 0.01492, 0.01027, 0.00734, 0.00582, 0.00466, 0.00397, 0.00294, 0.00301, 0.00227),
    before=(1.0, 0.48335, 0.12691),
)
"""Three prompt tokens of the paper's authors, for predictions. Unlike here, each distance was
measured by itself: whether nearer tokens were right did not matter."""

VICUNA_13B = _published_table(
    "Vicuna-13B",
    (0.51814, 0.1446, 0.07037, 0.03814, 0.02484, 0.0195, 0.01298, 0.01199, 0.0087, 0.0082),
    (0.15238, 0.07561, 0.04522, 0.02988, 0.01999, 0.01677, 0.01301, 0.0106, 0.00803, 0.00694),
    (0.02734, 0.01915, 0.0127, 0.00954, 0.00695),
    before=(1.0, 0.51814, 0.15238),
)
"""As VICUNA_7B. Of distance 3, the trees show five ranks."""
