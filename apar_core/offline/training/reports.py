"""What a training run tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """The steps since the last report: mean loss per learned token, and what they cost.

    `padding_share` is the share of padding among the tokens that the model ran on.
    `validation_loss` is set in the report that follows a validation, and only there.
    """

    step: int
    num_steps: int
    loss: float
    num_targets: int
    num_trees: int = 0
    padding_share: float = 0.0
    seconds: float = 0.0
    learning_rate: float = 0.0
    validation_loss: float | None = None

    @property
    def learned_tokens_per_s(self) -> float:
        """Targets of all processes in one second."""
        return self.num_targets / self.seconds if self.seconds else 0.0

    @property
    def trees_per_s(self) -> float:
        """Trees of all processes in one second."""
        return self.num_trees / self.seconds if self.seconds else 0.0


OnStep = Callable[[StepReport], None]
