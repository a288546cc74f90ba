"""Fork policies without step costs."""

from apar_core.scheduler.fork_policy import EagerPolicy
from apar_core.step_costs.costs import StepBatch


class MostTokens(EagerPolicy):
    """A step with more tokens than `most` takes too long."""

    counts_attended = True
    token_time_s = 0.001

    def __init__(self, most: int, first_token_s: float = 1e6) -> None:
        self.most = most
        self.first_token_s = first_token_s

    def keeps_to_time(self, batch: StepBatch) -> bool:
        return batch.tokens <= self.most

    def admits(self, batch: StepBatch, *, extra_attended: int = 0, extra_saved: int = 0) -> bool:
        return batch.tokens < self.most
