"""A simulated replica: an engine whose steps take time.

Steps in which nothing is admitted, forks or ends are taken together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import simpy

from apar_core.scheduler.fork_policy import ForkPolicy
from apar_core.step_costs.costs import StepBatch
from benchmarks.cluster_simulation.engine import SimEngine, StepPlan
from benchmarks.cluster_simulation.step_times import ReplicaModel
from benchmarks.cluster_simulation.threads import Outcome
from deployments.wire.load import ReplicaLoad

_NO_LIMIT = 1 << 40
# Rates and step times are reported over so many seconds, as a replica does.
_WINDOW_S = 2.0


class SimReplica:
    """One engine. `slowness` stretches its steps; `longest_chain` is 1 to go step by step."""

    def __init__(
        self,
        env: simpy.Environment,
        replica_id: str,
        model: ReplicaModel,
        policy: ForkPolicy,
        *,
        slowness: float = 1.0,
        longest_chain: int = _NO_LIMIT,
    ) -> None:
        self.env = env
        self.replica_id = replica_id
        self.model = model
        self.slowness = slowness
        self.engine = SimEngine(model, policy)
        self.busy_s = 0.0
        # Tokens by the time of the step in which they came, rounded.
        self.step_weights: Counter[float] = Counter()
        self._longest_chain = longest_chain
        self._plan: StepPlan | None = None
        self._num_steps = 0
        self._start_s = 0.0
        self._wake = 0
        self._samples = deque([(env.now, 0, 0, 0.0)])

    def submit(self, outcome: Outcome, on_end: Callable[[Outcome], None]) -> None:
        """Take a request now; `on_end` is called once, when its last thread has ended."""
        outcome.replica_id = self.replica_id
        self.engine.add(outcome, on_end)
        if self._plan is None:
            self._begin()
        else:
            self._cut()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self.engine.families)

    def steps_done(self) -> int:
        """Steps over since the engine last took account."""
        elapsed_s = (self.env.now - self._start_s) / self.slowness
        plan = self._plan
        if plan is None or self._num_steps <= 1 or elapsed_s <= 0:
            return 0
        begun = self.model.times.steps_within(elapsed_s, plan.rows, plan.attended)
        return min(begun - 1, self._num_steps)

    def work_done_s(self) -> float:
        """Time that all steps so far took beyond their base, at full speed."""
        done = self.steps_done()
        seconds = self.busy_s + (self._seconds(done) if done else 0.0)
        return seconds / self.slowness - self.model.times.base_s * (self.engine.step + done)

    def load(self) -> ReplicaLoad:
        """What the replica reports of itself now."""
        engine, now_s, done = self.engine, self.env.now, self.steps_done()
        steps = engine.step + done
        tokens = engine.generated_tokens + done * len(engine.batch)
        busy_s = self.busy_s + (self._seconds(done) if done else 0.0)
        samples = self._samples
        while len(samples) > 1 and samples[1][0] <= now_s - _WINDOW_S:
            samples.popleft()
        then_s, steps_then, tokens_then, busy_then_s = samples[0]
        samples.append((now_s, steps, tokens, busy_s))
        num_steps, passed_s = steps - steps_then, now_s - then_s
        return ReplicaLoad(
            requests=len(engine.families),
            threads=engine.num_threads,
            waiting_forks=engine.num_waiting_forks,
            blocks=engine.pool.blocks,
            free_blocks=engine.pool.free - engine.batch.growth(engine.step, done),
            block_size=self.model.block_size,
            tokens_per_s=(tokens - tokens_then) / passed_s if passed_s > 0 else 0.0,
            step_s=(busy_s - busy_then_s) / num_steps if num_steps else 0.0,
            taken_at_s=now_s,
        )

    def _begin(self) -> None:
        self._plan = self.engine.begin()
        if self._plan is None:
            return
        self._start_s = self.env.now
        self._num_steps = min(self._plan.most_steps, self._longest_chain)
        self._sleep(self._seconds(self._num_steps))

    def _seconds(self, num_steps: int) -> float:
        """Time of the first steps of the plan."""
        plan, times = self._plan, self.model.times
        assert plan is not None
        seconds = times.steps_s(num_steps, plan.rows, plan.attended)
        return (seconds + times.prefill_token_s * plan.prefill_tokens) * self.slowness

    def _sleep(self, seconds: float) -> None:
        self._wake += 1
        timeout = self.env.timeout(seconds, value=self._wake)
        assert timeout.callbacks is not None
        timeout.callbacks.append(self._woken)

    def _cut(self) -> None:
        """End the plan after the step that is running."""
        begun = self.steps_done() + 1
        if begun < self._num_steps:
            self._num_steps = begun
            self._sleep(max(0.0, self._start_s + self._seconds(begun) - self.env.now))

    def _woken(self, event: simpy.Event) -> None:
        if event.value != self._wake:
            return
        plan, num_steps = self._plan, self._num_steps
        assert plan is not None
        seconds = self._seconds(num_steps)
        self.busy_s += seconds
        middle = plan.attended + len(self.engine.batch) * (num_steps - 1) // 2
        view = StepBatch(plan.rows, middle, plan.prefill_tokens)
        self.engine.admission.policy.observe(view, seconds / num_steps)
        self.step_weights[round(seconds / num_steps, 4)] += plan.rows * num_steps
        # A request that comes in there finds no plan to cut.
        self._num_steps = 0
        self.engine.end(num_steps, self.env.now)
        self._begin()
