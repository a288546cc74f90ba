"""`apar experiment validate`: predict the duration of whole runs, and compare with a real engine.

In each repeat, the real engine makes a pass over a grid of steps, then executes every run. Repeats
run the same steps, and the shortest time of each step counts, as in `apar experiment calibrate`:
the measured duration of a run is the sum of these times. Up to four step costs predict the runs:

- published: those that predictions use for this GPU without a measurement, if it is known.
- grid: fitted to the steps of the grid, as by `apar experiment calibrate`.
- sequential: fitted to the steps of the sequential runs. They predict the forked runs. No
  sequential step reads a KV block twice; see `fit_samples` for what is assumed then.
- smallest limit: fitted to the steps of the runs with the fewest concurrent requests. They predict
  those with more.

With asynchronous scheduling, as on a GPU, a run's duration is that of its shortest repeat. Its
steps are not sampled, because that would lengthen it, so only the first two predict it.

A prediction is a run of the whole engine in virtual time with these costs. No run is predicted from
its own steps. The costs of the grid are written to `step-costs.json`, which other commands accept.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apar_core.errors import EvaluationError, StepCostsError
from apar_core.reporting import Column, Report, ReportTable
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.files import write_costs
from cluster.lab.experiments.calibrate import (
    COSTS_FILE,
    StepTimer,
    calibrated_engine,
    fit_samples,
    lack_of_room,
    least_samples,
    measure_forks,
    measure_point,
    on_gpu,
    plain_sample,
    read_samples,
)
from cluster.lab.experiments.engine import ExperimentEngine, RunConditions, hidden_ids
from cluster.lab.experiments.parts import PartStore, StartStage
from cluster.lab.experiments.program import ReplayedRequest
from cluster.lab.experiments.settings import ValidationSettings, machine_name
from cluster.lab.settings import ModelOnGpu
from cluster.lab.virtual.engine import VirtualEngine, VirtualSpec
from cluster.loadtest.replay_answers import ReplayAnswer, replay_answers
from cluster.loadtest.trace import read_trace
from deployments.config.model import model_path

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.offline.evaluation.replay_text import ModelText
    from cluster.lab.virtual.text import FoldedText

SEQUENTIAL = "sequential"
METHODS = (SEQUENTIAL, "eager")
_FITS = ("grid", SEQUENTIAL, "smallest limit")
_GRID, _PUBLISHED = "grid", "published"


@dataclass(frozen=True, slots=True)
class RunPoint:
    """A run: its method, its limit on concurrent requests, and its share of the KV cache."""

    method: str
    limit: int
    kv_share: float

    @property
    def name(self) -> str:
        """Short description of the run."""
        return f"{self.method}, {self.limit} requests, {self.kv_share:g} of KV"


@dataclass(frozen=True, slots=True)
class TimedRun:
    """Seconds of a run from the first request to the last answer, its steps and text tokens."""

    duration_s: float
    steps: int
    text_tokens: int


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run's duration, as the module describes, and its whole repeats."""

    duration_s: float
    repeats: Sequence[TimedRun]


def measure_runs(
    settings: ValidationSettings,
    folder: Path,
    start_stage: StartStage,
    machine: str | None = None,
) -> PartStore:
    """Execute the runs and grid passes that the folder lacks, and return its store.

    machine: the machine on which the folder's parts were measured; None: this one.

    Raises EvaluationError for a folder with other settings, or a model without control tokens.
    """
    store = PartStore(folder, {**settings.as_text(), "machine": machine or machine_name()})
    wanted = _wanted(settings)
    missing = [
        (number, point) for number, point in wanted if not store.has(run_name(number, point))
    ]
    if missing or not store.has("engine"):
        _measure(missing, settings, store, start_stage)
    return store


def _wanted(settings: ValidationSettings) -> list[tuple[int, str | RunPoint]]:
    sources: list[str | RunPoint] = [_GRID, *run_points(settings)]
    return [(number, point) for number in range(settings.repeats) for point in sources]


def validate(
    settings: ValidationSettings,
    folder: Path,
    start_stage: StartStage,
    machine: str | None = None,
) -> Report:
    """Execute the runs that the folder lacks, predict each, and report the errors.

    Raises EvaluationError as `measure_runs` does, or if the repeats of a run took different steps.
    """
    machine, settings = machine or machine_name(), settings.with_weights(folder)
    store = measure_runs(settings, folder, start_stage, machine)
    points = list(run_points(settings))
    sources: list[str | RunPoint] = [_GRID, *points]
    numbers = range(settings.repeats)
    facts = dict(store.find("engine"))
    has_gpu, num_answers = facts.pop("on_gpu"), facts.pop("num_answers")
    fits = (_GRID,) if facts["is_async"] else _FITS
    samples = {
        point: least_samples([read_samples(store, run_name(number, point)) for number in numbers])
        for point in sources
    }
    measured: dict[RunPoint, MeasuredRun] = {}
    for point in points:
        parts = [store.find(run_name(number, point)) for number in numbers]
        repeats = [
            TimedRun(part["duration_s"], part["steps"], part["text_tokens"]) for part in parts
        ]
        # With asynchronous scheduling, no step has a sample.
        if len(samples[point]) > repeats[0].steps:
            raise EvaluationError(f"the repeats of {point.name!r} took different steps")
        if facts["is_async"]:
            # The times of device and engine core overlap.
            duration_s = min(each.duration_s for each in repeats)
        else:
            duration_s = sum(each.device_s + (each.host_s or 0.0) for each in samples[point])
        measured[point] = MeasuredRun(duration_s, repeats)
    name = f"{settings.model} on {machine}"
    costs = {
        fit: fit_samples(
            [each for source in _sources(fit, points) for each in samples[source]],
            name=f"{name}, fitted to {fit}",
            source="apar experiment validate",
            on_gpu=has_gpu,
            knots=settings.grid.knots if fit == _GRID else None,
        ).costs
        for fit in fits
    }
    write_costs(costs[_GRID], folder / COSTS_FILE)
    published = published_costs(settings.model, machine, facts["block_size"]) if has_gpu else None
    if published is not None:
        costs = {_PUBLISHED: published, **costs}
    predicted = predict(settings, points, costs, facts, start_stage)
    loads = [store.find(run_name(*each))["load_average"] for each in _wanted(settings)]
    kv_tokens = min(settings.kv_tokens, facts["kv_tokens"])
    return _report(
        settings, machine, (num_answers, kv_tokens), measured, predicted, costs,
        statistics.median(loads),
    )  # fmt: skip


def published_costs(model: str, gpu: str, block_size: int) -> StepCosts | None:
    """Return the step costs that predictions use for a GPU; None if it is unknown."""
    try:
        return ModelOnGpu(model_path(model), gpu, block_size=block_size).costs
    except StepCostsError:
        return None


def run_points(settings: ValidationSettings) -> Iterator[RunPoint]:
    """Yield the runs, the smallest limit first, sequential before forked."""
    for limit in sorted(settings.limits):
        for kv_share in settings.kv_shares:
            for method in METHODS:
                yield RunPoint(method, limit, kv_share)


def _sources(fit: str, points: Sequence[RunPoint]) -> list[str | RunPoint]:
    """Return the runs and passes that a fit takes its steps from; none for published costs."""
    if fit == _PUBLISHED:
        return []
    if fit == _GRID:
        return [_GRID]
    if fit == SEQUENTIAL:
        return [point for point in points if point.method == SEQUENTIAL]
    least = min(point.limit for point in points)
    return [point for point in points if point.limit == least]


def _measure(
    missing: Sequence[tuple[int, str | RunPoint]],
    settings: ValidationSettings,
    store: PartStore,
    start_stage: StartStage,
) -> None:
    grid = settings.grid
    # Imports transformers, which takes seconds.
    from apar_core.offline.evaluation.replay_text import load_text

    answers = load_answers(settings, load_text(settings.tokenizer))
    engine = calibrated_engine(
        settings.model,
        settings.engine,
        kv_tokens=max(settings.kv_tokens, (settings.max_tokens + 600) * max(grid.rows)),
        **engine_limits(settings),
    )
    try:
        experiment = ExperimentEngine(engine, hidden_ids(engine, settings.model))
        if not store.has("engine"):
            found_facts = {"on_gpu": on_gpu(), "num_answers": len(answers)}
            store.add("engine", {**engine_facts(engine), **found_facts})
        timer = StepTimer(engine, clock=lambda: experiment.clock())
        done = start_stage("runs", len(missing) + 1)
        # The first steps of an engine allocate and compile.
        replay(experiment, answers[:4], settings, RunPoint("eager", 4, 1.0))
        done()
        gc.collect()
        gc.freeze()
        for number, point in missing:
            timer.samples = []
            timer.pause()
            if isinstance(point, RunPoint):
                timer.is_counting = not timer.is_async
                run = replay(experiment, answers, settings, point)
                timer.is_counting = True
                data: dict[str, Any] = asdict(run)
                found = timer.samples
            else:
                data = {}
                # With the whole KV cache, and no limit on requests.
                experiment.prepare(RunConditions())
                found = [*measure_forks(engine, timer, grid)]
                for context in grid.contexts:
                    for rows in grid.rows:
                        if lack_of_room(engine, grid, rows, context) is None:
                            found += measure_point(engine, timer, grid, rows, context)
            data["load_average"] = os.getloadavg()[0]
            data["samples"] = [plain_sample(each) for each in found]
            store.add(run_name(number, point), data)
            done()
    finally:
        engine.shutdown()


def engine_limits(settings: ValidationSettings) -> dict[str, int]:
    """Return vLLM's limits by name, with room for all runs and the grid."""
    return {
        "max_model_len": settings.max_tokens + 700,
        "max_num_seqs": 2 * max(max(settings.grid.rows), 64),
        "max_num_batched_tokens": 2048,
    }


def replay(
    engine: ExperimentEngine,
    answers: Sequence[ReplayAnswer],
    settings: ValidationSettings,
    point: RunPoint,
    costs: StepCosts | None = None,
) -> TimedRun:
    """Answer all questions, submitted at once, and time the run.

    `costs` are for a virtual engine. Raises EvaluationError if an answer differs from its script.
    """
    # Imports vLLM, which takes seconds.
    from cluster.lab.experiments.driver import RunPlan, drive

    kv_tokens = min(settings.kv_tokens, engine.num_blocks * engine.block_size)
    num_blocks = round(point.kv_share * kv_tokens) // engine.block_size
    forks = point.method != SEQUENTIAL
    plan = RunPlan(
        RunConditions(num_blocks=num_blocks, max_requests=point.limit),
        make=lambda index: ReplayedRequest(answers[index], forks=forks),
        num_questions=len(answers),
        costs=costs,
    )
    found = drive(engine, plan, sample_s=1.0)
    return TimedRun(found.duration_s, found.counts.steps, found.counts.text_tokens)


def load_answers(settings: ValidationSettings, text: ModelText | FoldedText) -> list[ReplayAnswer]:
    """Return the answers to replay, the same for each `text`."""
    lines = read_trace(settings.trace)
    fitting, _ = replay_answers(lines, text, text.tokens, max_tokens=settings.max_tokens)
    if len(fitting) > settings.answers:
        fitting = random.Random(0).sample(fitting, settings.answers)
    return fitting


def engine_facts(engine: OfflineEngine) -> dict[str, Any]:
    """Return what a virtual engine needs to take the same steps."""
    config: Any = engine.llm.llm_engine.vllm_config
    model = config.model_config
    return {
        "config": json.loads(model.hf_config.to_json_string(use_diff=False)),
        # One block is vLLM's null block.
        "kv_tokens": engine.scheduler.block_size
        * (engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1),
        "block_size": engine.scheduler.block_size,
        "max_model_len": model.max_model_len,
        "max_rows": config.scheduler_config.max_num_seqs,
        "max_step_tokens": config.scheduler_config.max_num_batched_tokens,
        "is_async": bool(config.scheduler_config.async_scheduling),
    }


def predict(
    settings: ValidationSettings,
    points: Sequence[RunPoint],
    costs: Mapping[str, StepCosts],
    facts: Mapping[str, Any],
    start_stage: StartStage,
) -> dict[tuple[str, RunPoint], TimedRun]:
    """Execute every run in virtual time, with all step costs that were not fitted to it."""
    from cluster.lab.virtual.text import virtual_text

    wanted = [
        (fit, point) for fit in costs for point in points if point not in _sources(fit, points)
    ]
    done = start_stage("predictions", len(wanted))
    predicted: dict[tuple[str, RunPoint], TimedRun] = {}
    with VirtualEngine(VirtualSpec(costs=costs[_GRID], **facts)) as virtual:
        engine = ExperimentEngine(virtual, hidden_ids(virtual, settings.model))
        answers = load_answers(settings, virtual_text(settings.tokenizer))
        for fit, point in wanted:
            predicted[fit, point] = replay(engine, answers, settings, point, costs[fit])
            done()
    return predicted


def run_name(number: int, point: str | RunPoint) -> str:
    """Return the name of a run, or of a pass over the grid, among the parts of a folder."""
    return f"repeat {number}, {point.name if isinstance(point, RunPoint) else point}"


def _report(
    settings: ValidationSettings,
    machine: str,
    numbers: tuple[int, int],
    measured: Mapping[RunPoint, MeasuredRun],
    predicted: Mapping[tuple[str, RunPoint], TimedRun],
    costs: Mapping[str, StepCosts],
    load: float,
) -> Report:
    """Report the runs; `numbers` are the answers per run and the tokens of the KV cache."""
    num_answers, kv_tokens = numbers
    columns = [
        Column("run"), Column("steps", "d"), Column("tokens/s", ".0f"),
        Column("measured s", ".2f"), Column("from s", ".2f"), Column("to s", ".2f"),
    ]  # fmt: skip
    for fit in costs:
        columns += [Column(f"{fit}: s", ".2f"), Column("error %", "+.1f")]
    rows = []
    errors: dict[str, list[float]] = {fit: [] for fit in costs}
    same_steps = True
    for point, run in measured.items():
        durations = [each.duration_s for each in run.repeats]
        first = run.repeats[0]
        row: list[str | float | None] = [
            point.name, first.steps, first.text_tokens / run.duration_s, run.duration_s,
            min(durations), max(durations),
        ]  # fmt: skip
        for fit in costs:
            found = predicted.get((fit, point))
            if found is None:
                row += [None, None]
                continue
            error = found.duration_s / run.duration_s - 1
            errors[fit].append(error)
            row += [found.duration_s, 100 * error]
            same_steps &= all(each.steps == found.steps for each in run.repeats)
        rows.append(tuple(row))
    facts = {
        "Machine": f"measured on {machine}, load average {load:.1f}",
        "Runs": f"{num_answers} answers of {settings.trace}, "
        f"{settings.repeats} repeats, shortest time of each step; {kv_tokens} tokens of KV cache",
        "Steps": "as many in virtual time as measured, in every run"
        if same_steps
        else "NOT as many in virtual time as measured",
        "Costs": f"those of the grid are in {COSTS_FILE}: pass it to other commands as --costs",
    }
    for fit in costs:
        if errors[fit]:
            within = sum(abs(error) <= 0.1 for error in errors[fit])
            title = "Published costs" if fit == _PUBLISHED else f"Fitted to {fit}"
            facts[title] = (
                f"{within} of {len(errors[fit])} runs within 10%; errors {min(errors[fit]):+.1%} "
                f"to {max(errors[fit]):+.1%}"
            )
    table = ReportTable(
        "runs",
        "Durations of whole runs, measured and predicted",
        tuple(columns),
        tuple(rows),
        note="Measured: the sum of the shortest times of each step; with asynchronous scheduling, "
        "the shortest repeat. From, to: durations of whole repeats. A dash: the costs were fitted "
        "to steps of this run. Errors: predicted over measured, minus 1.",
    )
    data = {"costs": {fit: asdict(found) for fit, found in costs.items()}}
    tables = [table, _speed_ups(measured, predicted, costs)]
    return Report("Predicted durations of whole runs", facts, tables, {}, data)


def _speed_ups(
    measured: Mapping[RunPoint, MeasuredRun],
    predicted: Mapping[tuple[str, RunPoint], TimedRun],
    costs: Mapping[str, StepCosts],
) -> ReportTable:
    """Return the speed-up of forked over sequential runs, measured and as each fit predicts."""
    rows = []
    for forked in measured:
        sequential = replace(forked, method=SEQUENTIAL)
        if forked == sequential:
            continue
        row: list[str | float | None] = [
            f"{forked.limit} requests, {forked.kv_share:g} of KV",
            measured[sequential].duration_s / measured[forked].duration_s,
        ]
        for fit in costs:
            slow, fast = predicted.get((fit, sequential)), predicted.get((fit, forked))
            row.append(slow.duration_s / fast.duration_s if slow and fast else None)
        rows.append(tuple(row))
    columns = (
        Column("runs"), Column("measured", ".2f"), *(Column(fit, ".2f") for fit in costs)
    )  # fmt: skip
    return ReportTable(
        "speed_ups", "Speed-up of forked over sequential decoding", columns, tuple(rows)
    )
