"""Fork policies: whether a fork may run beside the present batch.

The policy is the last of the checks in `fork_admission.py`, and the only one that looks at time.
Policies are pure functions of batches and step times, so the simulation of a cluster uses the same
code. No policy can block a request: a child whose request has no live thread skips the policy.
To add a policy, implement `ForkPolicy` and name it in `PolicyName` and `build_policy`.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

from apar_core.scheduler.step_time import LearnedStepCosts
from apar_core.step_costs.costs import StepBatch, StepCosts

PolicyName = Literal["eager", "adaptive"]

FIRST_TOKEN_S = 1.0
"""Time to first token that the adaptive policy uses by default."""


class ForkPolicy(Protocol):
    """Decides on forks one by one, in the order in which they would start."""

    counts_attended: bool
    """Whether its batches have attended tokens, which take time to count; without, 0."""

    token_time_s: float
    """Time per token that the policy keeps to, infinite without one."""
    first_token_s: float
    """Time until a request's first token that the policy may use for it."""

    @property
    def step_costs(self) -> StepCosts | None:
        """Step costs as learned so far, None for a policy that learns none."""

    def step_s(self, batch: StepBatch) -> float:
        """Return the predicted time of a step with a margin; 0 while nothing can be predicted."""

    def admits(self, batch: StepBatch, limit_s: float | None = None) -> bool:
        """Return whether a fork may run, with which the next step has this batch.

        `limit_s`: limit on the step's time instead of the policy's (`pacing.py`).
        """

    def pays(self, batch: StepBatch, *, attended: int, useful_share: float) -> bool:
        """Return whether one more row raises the throughput, if it gives less text than others.

        `attended`: the tokens that the row attends to. `useful_share`: the text that it gives, as a
        share of that of another row.
        """

    def observe(self, batch: StepBatch, seconds: float) -> None:
        """Learn from the duration of an engine step."""


class EagerPolicy:
    """Start every fork at once, as far as the limits on threads allow."""

    counts_attended = False
    token_time_s = first_token_s = math.inf
    step_costs: StepCosts | None = None

    def step_s(self, batch: StepBatch) -> float:
        """Return 0."""
        return 0.0

    def admits(self, batch: StepBatch, limit_s: float | None = None) -> bool:
        """Return True."""
        return True

    def pays(self, batch: StepBatch, *, attended: int, useful_share: float) -> bool:
        """Return True."""
        return True

    def observe(self, batch: StepBatch, seconds: float) -> None:
        """Ignore the step."""


class AdaptivePolicy:
    """Start a fork while the predicted step time stays within the time per token.

    Eager until enough steps are known. Threads that have started rest in steps that would take
    longer (`pacing.py`). Idea: TAPER (arXiv 2605.06914).
    """

    counts_attended = True

    def __init__(
        self,
        token_time_s: float,
        learned: LearnedStepCosts | None = None,
        first_token_s: float = FIRST_TOKEN_S,
    ) -> None:
        self.token_time_s = token_time_s
        self.first_token_s = first_token_s
        self.learned = LearnedStepCosts() if learned is None else learned

    @property
    def step_costs(self) -> StepCosts:
        """Step costs as learned so far; zero until enough is known."""
        return self.learned.costs

    def step_s(self, batch: StepBatch) -> float:
        """Return the predicted time of a step, with the usual error of predictions as a margin."""
        learned = self.learned
        return learned.predict_s(batch) + learned.usual_error_s if learned.is_ready else 0.0

    def admits(self, batch: StepBatch, limit_s: float | None = None) -> bool:
        """Return whether the batch keeps to the limit, by default the time per token."""
        if not self.learned.is_ready:
            return True
        # Predictions far beyond the batches seen so far are guesses: grow in steps, then learn.
        if batch.rows > max(2 * self.learned.largest_rows, 8):
            return False
        return self.step_s(batch) <= (self.token_time_s if limit_s is None else limit_s)

    def pays(self, batch: StepBatch, *, attended: int, useful_share: float) -> bool:
        """Return whether the step's text is predicted to grow by more than its time."""
        if not self.learned.is_ready:
            return True
        grown = batch.grown(rows=1, attended_tokens=attended)
        now_s, grown_s = self.learned.predict_s(batch), self.learned.predict_s(grown)
        return grown_s * batch.rows <= now_s * (batch.rows + useful_share)

    def observe(self, batch: StepBatch, seconds: float) -> None:
        """Learn the costs of the step."""
        self.learned.observe(batch, seconds)


def build_policy(
    name: PolicyName,
    token_time_s: float,
    known: StepCosts | None = None,
    first_token_s: float = FIRST_TOKEN_S,
) -> ForkPolicy:
    """Return the named policy.

    The adaptive policy keeps to `token_time_s` per output token and to `first_token_s`, and starts
    from `known` costs.
    """
    if name == "eager":
        return EagerPolicy()
    return AdaptivePolicy(token_time_s, LearnedStepCosts(known), first_token_s)
