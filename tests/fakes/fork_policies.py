"""Fork policies without step costs."""

from apar_core.scheduler.fork_policy import EagerPolicy
from apar_core.step_costs.costs import StepBatch


class MostTokens(EagerPolicy):
    """A step takes a second per token, and `most` seconds are the time per token."""

    counts_attended = True

    def __init__(self, most: int, first_token_s: float = 1e6) -> None:
        self.token_time_s = most
        self.first_token_s = first_token_s

    def step_s(self, batch: StepBatch) -> float:
        return batch.tokens

    def admits(self, batch: StepBatch, limit_s: float | None = None) -> bool:
        return batch.tokens <= (self.token_time_s if limit_s is None else limit_s)
