"""Runs of experiments: execution in several processes, and results stored in a folder."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from apar_core.errors import EvaluationError
from apar_core.reporting import LineStore
from cluster.lab.experiments.methods import EAGER, METHODS, SEQUENTIAL, Method, Workload
from cluster.lab.experiments.parts import StartStage
from cluster.lab.experiments.samples import Sample, Spread, spread, steady
from cluster.lab.experiments.settings import ExperimentSettings, RunKey, closed_loop_answers
from cluster.lab.grid import grid

if TYPE_CHECKING:
    from apar_core.step_costs.costs import StepCosts
    from cluster.lab.experiments.driver import Drive, RunPlan, Served
    from cluster.lab.experiments.engine import ExperimentEngine

RUNS_FILE = "runs.jsonl"
_WARM_UP_ANSWERS = 4
# Fields of a run that are those of `StepCounts`, and of `StepTotals` in virtual time.
_COUNTED = (
    "steps", "rows", "computed_tokens", "preemptions", "peak_kv_tokens", "largest_rows",
    "largest_tokens",
)  # fmt: skip
_VIRTUAL = ("attended_tokens", "blocks", "distinct_blocks")


class CategoryCounts(BaseModel):
    """Sums over the answers of one category, for tables 1 and 2."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    answers: int = 0
    forked: int = 0
    threads: int = 0
    predicted_tokens: int = 0
    sequential_predicted_tokens: int = 0
    max_cached_tokens: int = 0
    sequential_max_cached_tokens: int = 0
    attended_tokens: int = 0
    sequential_attended_tokens: int = 0


class Run(BaseModel):
    """The result of one run.

    throughput: text tokens per second in the `kept_samples` steady-state samples; `kv_tokens` and
        `rows_per_step` are means over the same samples. With 0 kept samples, all three are of the
        whole run, as `whole_tokens_per_s` always is.
    latency_s: latency of answers, from arrival. token_latency_s: mean latency per text token.
    prompt_tokens: computed tokens that were not generated in the previous step.
    attended_tokens, blocks, distinct_blocks, held_back_steps: counted in virtual time only.
        Distinct blocks count a KV block once per step. In `held_back_steps` the limit on rows or
        tokens of a step held back a forked thread.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: RunKey
    capacity_tokens: int
    token_time_s: float | None
    answers: int
    text_tokens: int
    duration_s: float
    kept_samples: int
    throughput: Spread
    whole_tokens_per_s: float
    kv_tokens: float
    rows_per_step: float
    latency_s: Spread
    latency_p99_s: float
    token_latency_s: float
    steps: int
    rows: int
    sequences: int
    computed_tokens: int
    prompt_tokens: int
    preemptions: int
    peak_kv_tokens: int
    largest_rows: int
    largest_tokens: int
    forks: int
    forks_delayed: int
    attended_tokens: int | None
    blocks: int | None
    distinct_blocks: int | None
    held_back_steps: int | None
    categories: dict[str, CategoryCounts]
    samples: tuple[Sample, ...]

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.duration_s / self.steps

    @property
    def running_requests(self) -> float | None:
        """Mean number of requests being answered, in the steady-state samples."""
        counts = [each.running for each in steady(self.samples) if each.running is not None]
        return statistics.fmean(counts) if counts else None

    @property
    def attended_per_row(self) -> float | None:
        """Mean tokens that a row of a step attends to."""
        return None if self.attended_tokens is None else self.attended_tokens / self.rows

    @property
    def distinct_percent(self) -> float | None:
        """Distinct KV blocks of a step, in percent of the blocks that all of its rows read."""
        if not self.blocks or not self.distinct_blocks:
            return None
        return 100 * (self.distinct_blocks / self.blocks)


class RunStore(LineStore[RunKey, Run]):
    """The runs of one folder."""

    def __init__(self, folder: Path, settings: ExperimentSettings) -> None:
        """Open the folder. Raises EvaluationError if runs with other settings are in it."""
        super().__init__(folder / RUNS_FILE, settings.as_text(), Run, lambda run: run.key)


def do_runs(
    keys: Sequence[RunKey],
    settings: ExperimentSettings,
    store: RunStore,
    start_stage: StartStage,
    *,
    workers: int = 1,
) -> None:
    """Execute the runs that the store does not have.

    Virtual runs are independent and use several processes, whose number does not change a byte of
    the store. Real runs are executed one after another in this process.
    """
    missing = [key for key in keys if key not in store.lines]
    if not missing:
        return
    done = start_stage("runs", len(missing))
    # The adaptive policy's time per token is a multiple of the sequential run's mean step.
    first = [key for key in missing if not _is_adaptive(key)]
    later = [key for key in missing if _is_adaptive(key)]
    for each in (first, later):
        # An engine is started for each model and format.
        each.sort(key=lambda key: (key.model, METHODS[key.method].parallel_format or ""))
    number = min(workers, len(missing)) if settings.is_virtual else 1
    with grid(number, Worker, settings) as run_all:
        for wave in (first, later):
            tasks = [(key, _token_time_s(key, settings, store)) for key in wave]
            for _, run in run_all(tasks):
                store.add(run)
                done()
    store.sort()


def _token_time_s(key: RunKey, settings: ExperimentSettings, store: RunStore) -> float | None:
    if not _is_adaptive(key):
        return None
    return settings.token_time_multiple * store.lines[key.of_method(SEQUENTIAL)].step_s


def _is_adaptive(key: RunKey) -> bool:
    return METHODS[key.method].policy == "adaptive"


def run_plan(
    method: Method,
    workload: Workload,
    *,
    num_blocks: int,
    concurrency: int,
    is_closed_loop: bool,
    reserve_tokens: int,
    token_time_s: float = 1.0,
    costs: StepCosts | None = None,
) -> RunPlan:
    """Return the plan of a run of a method; `reserve_tokens` are for methods with a reserve."""
    from cluster.lab.experiments.driver import RunPlan
    from cluster.lab.experiments.engine import RunConditions

    limited_by_clients = is_closed_loop or not method.is_one_request
    questions, marker = workload.questions, workload.marker_id
    number = len(questions)
    return RunPlan(
        conditions=RunConditions(
            num_blocks=num_blocks,
            max_requests=None if limited_by_clients else concurrency,
            policy=method.policy,
            token_time_s=token_time_s,
            growth_reserve_tokens=reserve_tokens if method.reserves else 0,
        ),
        make=lambda index: method.build(questions[index], marker),
        num_questions=closed_loop_answers(concurrency, number) if is_closed_loop else number,
        clients=concurrency if limited_by_clients else None,
        is_closed_loop=is_closed_loop,
        costs=costs,
    )


class Worker:
    """Executes runs in this process; keeps its engine and the questions from run to run."""

    def __init__(self, settings: ExperimentSettings) -> None:
        self._settings = settings
        self._engine: ExperimentEngine | None = None
        self._engine_model: tuple[str, str | None] | None = None
        # By the name of the trace, and the format whose threads the answers have.
        self._workloads: dict[tuple[str, str | None], Workload] = {}

    def run(self, key: RunKey, token_time_s: float | None = None) -> Run:
        """Execute a run.

        Raises EvaluationError for a trace or model that cannot be read, a KV cache too small for
        the questions, and an answer that differs from the recorded one.
        """
        from cluster.lab.experiments.driver import drive

        settings, method = self._settings, METHODS[key.method]
        engine = self._engine_of(key.model, method.parallel_format)
        workload = self._workload(key.trace, method.parallel_format, engine)
        costs, capacity_blocks = None, engine.num_blocks
        if settings.is_virtual:
            costs, capacity_blocks = settings.virtual_device(key.model, key.device)
        num_blocks = round(key.kv_share * capacity_blocks)
        room = num_blocks * engine.block_size
        if room < workload.longest_tokens:
            raise EvaluationError(
                f"{key.kv_share:g} of the KV cache holds {room} tokens, but a question of the "
                f"{key.trace} trace may need {workload.longest_tokens}: give larger shares or a "
                "smaller --context-length"
            )
        plan = run_plan(
            method,
            workload,
            num_blocks=num_blocks,
            concurrency=key.concurrency,
            is_closed_loop=key.is_closed_loop,
            reserve_tokens=settings.growth_reserve_tokens,
            token_time_s=token_time_s or 1.0,
            costs=costs,
        )
        found = drive(engine, plan, sample_s=settings.sample_s)
        return run_of(key, found, room, token_time_s)

    def close(self) -> None:
        """Shut the engine down."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
            gc.unfreeze()

    def _engine_of(self, model: str, parallel_format: str | None) -> ExperimentEngine:
        if self._engine is None or self._engine_model != (model, parallel_format):
            self.close()
            # Imports vLLM, which takes seconds.
            from cluster.lab.experiments.engine import open_engine

            self._engine = open_engine(self._settings, model, parallel_format)
            self._engine_model = (model, parallel_format)
            freeze_garbage()
        return self._engine

    def _workload(
        self, trace: str, parallel_format: str | None, engine: ExperimentEngine
    ) -> Workload:
        name = trace, parallel_format
        if name not in self._workloads:
            from cluster.lab.experiments.engine import load_questions

            workload = load_questions(self._settings, trace, engine, parallel_format)
            if not self._settings.is_virtual and not self._workloads:
                _warm_up(engine, workload)
            self._workloads[name] = workload
            freeze_garbage()
        return self._workloads[name]


def _warm_up(engine: ExperimentEngine, workload: Workload) -> None:
    """Answer a few questions, so that no run pays for the one-time setup of a real engine."""
    from cluster.lab.experiments.driver import drive

    few = Workload(workload.questions[:_WARM_UP_ANSWERS], workload.marker_id)
    for name in (SEQUENTIAL, EAGER):
        plan = run_plan(
            METHODS[name], few, num_blocks=engine.num_blocks, concurrency=len(few.questions),
            is_closed_loop=False, reserve_tokens=0,
        )  # fmt: skip
        drive(engine, plan, sample_s=1.0)


def freeze_garbage() -> None:
    """Exempt existing objects from garbage collection, which vLLM's many objects make slow."""
    gc.collect()
    gc.freeze()


def run_of(key: RunKey, found: Drive, capacity_tokens: int, token_time_s: float | None) -> Run:
    """Summarize the measurements of a run."""
    counts, totals, served = found.counts, found.totals, found.served
    text_tokens = sum(each.text_tokens for each in served)
    # The engine also counts the markers of other methods, and a closed loop's fillers.
    counted = text_tokens if key.is_closed_loop else counts.text_tokens
    of_text = text_tokens / counted
    steady_samples = steady(found.samples)
    kept = steady_samples or [found.whole]
    latencies = sorted(each.latency_s for each in served)
    return Run(
        key=key,
        capacity_tokens=capacity_tokens,
        token_time_s=token_time_s,
        answers=len(served),
        text_tokens=text_tokens,
        duration_s=found.duration_s,
        kept_samples=len(steady_samples),
        throughput=spread([each.tokens_per_s * of_text for each in kept]),
        whole_tokens_per_s=found.whole.tokens_per_s * of_text,
        kv_tokens=statistics.fmean(each.kv_tokens for each in kept),
        rows_per_step=statistics.fmean(each.rows for each in kept),
        latency_s=spread(latencies),
        latency_p99_s=latencies[min(int(0.99 * len(latencies)), len(latencies) - 1)],
        token_latency_s=statistics.fmean(each.latency_s / each.text_tokens for each in served),
        sequences=found.sequences,
        prompt_tokens=found.prompt_tokens,
        forks=found.forks,
        forks_delayed=found.forks_delayed,
        **{name: getattr(counts, name) for name in _COUNTED},
        **{name: None if totals is None else getattr(totals, name) for name in _VIRTUAL},
        held_back_steps=(
            None if totals is None else totals.row_limited_steps + totals.token_limited_steps
        ),
        categories=_by_category(served),
        samples=found.samples,
    )


def total(counts: Iterable[CategoryCounts]) -> CategoryCounts:
    """Return the sums of counts."""
    values = [each.model_dump() for each in counts]
    return CategoryCounts(
        **{name: sum(each[name] for each in values) for name in CategoryCounts.model_fields}
    )


def _by_category(served: Sequence[Served]) -> dict[str, CategoryCounts]:
    found: dict[str, list[CategoryCounts]] = {}
    for each in served:
        known = each.statistics
        if known is not None:
            counts = CategoryCounts(
                answers=1,
                forked=int(known.forks > 0),
                threads=known.threads,
                predicted_tokens=known.text_tokens + known.forks + known.threads,
                sequential_predicted_tokens=known.sequential_steps,
                max_cached_tokens=known.max_cached_tokens,
                sequential_max_cached_tokens=known.sequential_max_cached_tokens,
                attended_tokens=known.attended_tokens,
                sequential_attended_tokens=known.sequential_attended_tokens,
            )
            found.setdefault(each.category, []).append(counts)
    return {name: total(counts) for name, counts in sorted(found.items())}
