"""Whether a fork may run beside what runs already: at once, or only where there is time for it.

Pure decisions, fed with batches and seconds: the scheduler and the cluster's simulation call the
same code. Neither policy can hold a family up: a child whose family has no other thread alive
starts without being asked about.
"""

from __future__ import annotations

from typing import Literal, Protocol

from apar_core.scheduler.step_time import BatchView, StepTimeModel

PolicyName = Literal["eager", "adaptive"]


class ForkPolicy(Protocol):
    """Decides on forks one by one, in the order in which they would start."""

    def admits(self, batch: BatchView, *, extra_rows: int = 1, extra_attended: int = 0) -> bool:
        """Whether rows that attend to so many tokens may join the batch of the coming steps."""

    def observe(self, batch: BatchView, seconds: float) -> None:
        """Learn from an engine step that took so long."""


class EagerPolicy:
    """Every fork runs at once, as far as the caps on threads allow."""

    def admits(self, batch: BatchView, *, extra_rows: int = 1, extra_attended: int = 0) -> bool:
        """Always."""
        return True

    def observe(self, batch: BatchView, seconds: float) -> None:
        """Nothing to learn."""


class AdaptivePolicy:
    """A fork runs while the predicted step leaves every row its time per token.

    Eager until the model has seen enough steps. Idea: TAPER (arXiv 2605.06914); unlike there, a
    thread that has started is not paused again, and time saved in earlier steps is not spent.
    """

    def __init__(self, token_time_s: float, model: StepTimeModel | None = None) -> None:
        self.token_time_s = token_time_s
        self.model = StepTimeModel() if model is None else model

    def admits(self, batch: BatchView, *, extra_rows: int = 1, extra_attended: int = 0) -> bool:
        """Whether the step with these rows will end within the time per token, as far as it is
        known: the more the steps scatter, the more room is left.
        """
        if not self.model.is_ready:
            return True
        grown = batch.grown(rows=extra_rows, attended_tokens=extra_attended)
        # Far beyond all that was seen a prediction is a guess: grow by steps, and look.
        if grown.rows > max(2 * self.model.largest_rows, 8):
            return False
        return self.model.predict_s(grown) + self.model.usual_error_s <= self.token_time_s

    def observe(self, batch: BatchView, seconds: float) -> None:
        """Teach the model a step."""
        self.model.observe(batch, seconds)


def build_policy(name: PolicyName, token_time_s: float) -> ForkPolicy:
    """The policy of that name; `token_time_s` is the adaptive one's time per output token."""
    return EagerPolicy() if name == "eager" else AdaptivePolicy(token_time_s)
