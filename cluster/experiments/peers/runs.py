"""The runs of the comparison, kept one by one: every method in each round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator

from cluster.experiments.driver import Drive, RunPlan, drive_side_by_side
from cluster.experiments.experiment_engine import Conditions, ExperimentEngine
from cluster.experiments.parts import LineStore
from cluster.experiments.peers.methods import METHODS, SEQUENTIAL, Question
from cluster.experiments.run_watch import RunWatch, watched
from cluster.experiments.samples import steady
from cluster.experiments.settings import ExperimentSettings
from cluster.experiments.side_by_side import plans_of, unfinished_groups, with_learned_steps

RUNS_FILE = "runs.jsonl"


class PeerSettings(ExperimentSettings):
    """The settings of an experiment, and which methods meet how often."""

    methods: tuple[str, ...] = Field(tuple(METHODS), description="Ways of answering.")
    rounds: PositiveInt = Field(2, description="Runs of each method at each share.")
    kv_shares: tuple[PositiveFloat, ...] = Field((0.3, 0.9), description="Shares of the KV cache.")

    context_tokens: PositiveInt = Field(
        2048, description="Longest sequence of the engine: other methods' prompts are longer."
    )

    @field_validator("methods")
    @classmethod
    def _check_methods(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [method for method in methods if method not in METHODS]
        if unknown:
            raise ValueError(f"no method {', '.join(unknown)}: there are {', '.join(METHODS)}")
        if SEQUENTIAL not in methods:
            raise ValueError(f"{SEQUENTIAL} must be among the methods: all are compared with it")
        # It comes first: what the adaptive policy keeps to is a multiple of its step.
        return (SEQUENTIAL, *(method for method in methods if method != SEQUENTIAL))


class RunKey(BaseModel):
    """Which run this is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    kv_share: float
    round: int


class PeerRun(BaseModel):
    """What one run came to.

    `tokens_per_s` are text tokens a second while questions waited, warm-up cut, over
    `kept_samples` samples; with 0 of them it is of the whole run. Latencies are of
    answers, in seconds. `prompt_tokens` are those computed, beginnings of children and what
    preemptions made the engine compute again included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: RunKey
    answers: int
    text_tokens: int
    wall_s: float
    tokens_per_s: float
    kept_samples: int
    latency_mean_s: float
    latency_p99_s: float
    steps: int
    rows: int
    sequences: int
    prompt_tokens: int
    peak_kv_tokens: int
    kv_capacity_tokens: int
    preemptions: int
    token_time_s: float | None = None

    @property
    def whole_tokens_per_s(self) -> float:
        """Text tokens a second of the whole run, its beginning and end included."""
        return self.text_tokens / self.wall_s

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.wall_s / self.steps


class RunStore(LineStore[RunKey, PeerRun]):
    """The runs of one folder."""

    def __init__(self, folder: Path, settings: PeerSettings) -> None:
        """Open the folder. Raises EvaluationError if runs with other settings are in it."""
        super().__init__(folder / RUNS_FILE, settings.as_text(), PeerRun, lambda run: run.key)


def keys_of(settings: PeerSettings) -> list[RunKey]:
    """All runs, the methods of one share and round one after the other."""
    return [
        RunKey(method=method, kv_share=share, round=number)
        for number in range(settings.rounds)
        for share in settings.kv_shares
        for method in settings.methods
    ]


class PeerRunner:
    """Does the runs that a folder does not have yet, side by side in as many engines as there are.

    With a single engine they follow each other.
    """

    def __init__(
        self,
        engines: Sequence[ExperimentEngine],
        questions: Sequence[Question],
        marker: int,
        settings: PeerSettings,
        store: RunStore,
    ) -> None:
        self._engines = engines
        self._questions = questions
        self._marker = marker
        self._settings = settings
        self._store = store

    def warm_up(self) -> None:
        """Let every method answer a few questions, each in its engine."""
        number = min(2, len(self._questions))
        for method, engine in zip(self._settings.methods, cycle(self._engines), strict=False):
            self._drive([self._plan(engine, method, Conditions(concurrency=number), number)])

    def groups(self, keys: Sequence[RunKey]) -> Iterator[tuple[RunKey, ...]]:
        """Return the groups that are run side by side and are not all done."""
        return unfinished_groups(
            keys,
            len(self._engines),
            lambda key: (key.kv_share, key.round),
            lambda key: key in self._store.lines,
        )

    def run(
        self, keys: Sequence[RunKey], on_answer: Callable[[], None] = lambda: None
    ) -> list[PeerRun]:
        """Do the runs of a group and keep them."""
        plans = plans_of(keys, self._engines, self._plan_of, on_answer)
        with ExitStack() as stack:
            watches = [stack.enter_context(watched(plan.engine)) for plan in plans]
            drives = self._drive(plans)
        runs = [
            run_of(key, found, watch, plan.conditions)
            for key, plan, found, watch in zip(keys, plans, drives, watches, strict=True)
        ]
        for run in runs:
            self._store.add(run)
        return runs

    def _drive(self, plans: Sequence[RunPlan]) -> list[Drive]:
        return drive_side_by_side(plans, sample_s=self._settings.sample_s)

    def _plan_of(self, key: RunKey, engine: ExperimentEngine) -> RunPlan:
        """The clients keep to the limit on questions: the engine cannot tell whose a request is."""
        conditions = Conditions(
            kv_share=key.kv_share,
            concurrency=self._settings.max_requests,
            keeps_busy=False,
            policy=METHODS[key.method].policy,
        )
        number = len(self._questions)
        plan = self._plan(engine, key.method, conditions, number)
        if conditions.policy != "adaptive":
            return plan
        sequential = self._store.lines.get(key.model_copy(update={"method": SEQUENTIAL}))
        return with_learned_steps(
            plan,
            self._plan(engine, SEQUENTIAL, conditions, number),
            self._settings,
            step_s=None if sequential is None else sequential.step_s,
        )

    def _plan(
        self, engine: ExperimentEngine, method: str, conditions: Conditions, number: int
    ) -> RunPlan:
        build = METHODS[method].build
        questions, marker = self._questions, self._marker
        return RunPlan(engine, conditions, lambda index: build(questions[index], marker), number)


def run_of(key: RunKey, run: Drive, watch: RunWatch, conditions: Conditions) -> PeerRun:
    """Sum a run up."""
    text_tokens = sum(each.text_tokens for each in run.served)
    latencies = sorted(each.latency_s for each in run.served)
    # The engine also counts the markers of other methods, which are no text.
    of_text = text_tokens / run.counts.text_tokens
    kept = [sample.tokens_per_s * of_text for sample in steady(run.samples)]
    return PeerRun(
        key=key,
        answers=len(run.served),
        text_tokens=text_tokens,
        wall_s=run.wall_s,
        tokens_per_s=statistics.fmean(kept) if kept else text_tokens / run.wall_s,
        kept_samples=len(kept),
        latency_mean_s=statistics.fmean(latencies),
        latency_p99_s=latencies[min(int(0.99 * len(latencies)), len(latencies) - 1)],
        steps=run.counts.steps,
        rows=run.counts.rows,
        sequences=watch.sequences,
        prompt_tokens=watch.prompt_tokens(run.counts.computed_tokens),
        peak_kv_tokens=watch.peak_kv_tokens,
        kv_capacity_tokens=run.kv_tokens,
        preemptions=run.counts.preemptions,
        token_time_s=conditions.token_time_s if conditions.policy == "adaptive" else None,
    )
