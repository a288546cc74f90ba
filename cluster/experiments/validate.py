"""`apar experiment validate`: predict the duration of whole runs, and compare with a real engine.

In each repeat the real engine does a pass over a grid of steps and then every run, so that a
machine whose speed changes is the same to both. Three fits predict the runs:

- grid: of the steps of the grid, as `apar experiment calibrate` does.
- sequential: of the steps of the sequential runs. It predicts the forked runs.
- smallest limit: of the steps of the runs with the fewest concurrent requests. It predicts those
  with more.

A prediction is a run of the whole engine in virtual time with the fitted costs. No run is predicted
from its own steps.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from apar_core.errors import EvaluationError
from apar_core.reporting import Column, Report, ReportTable
from apar_core.step_costs.costs import StepCosts
from apar_core.virtual.engine import VOCABULARY_SIZE, VirtualEngine, VirtualSpec
from apar_core.workload.replay_answers import ReplayAnswer, replay_answers
from apar_core.workload.trace import read_trace
from cluster.config.model import PRESETS
from cluster.experiments.calibrate import (
    Grid,
    StepTimer,
    fit_samples,
    measure_forks,
    measure_point,
    open_replaying_engine,
    plain_sample,
    read_sample,
)
from cluster.experiments.parts import PartStore, StartStage
from cluster.experiments.settings import machine_name

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.formats.control_tokens import TreeTokens

METHODS = ("sequential", "eager")
_FITS = ("grid", "sequential", "smallest limit")
_GRID = "grid"
_FIRST_TEXT_ID = 300


class ValidationSettings(BaseModel):
    """The runs that are predicted.

    limits: requests that run at once at most. kv_shares: shares of a KV cache that holds the
    longest answers of the largest limit.
    cpu_time: measure the process's CPU time, for a CPU engine on a machine that others use.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    trace: Path
    answers: PositiveInt = 32
    max_tokens: PositiveInt = 600
    limits: tuple[PositiveInt, ...] = Field((2, 8), min_length=1)
    kv_shares: tuple[PositiveFloat, ...] = Field((1.0, 0.4), min_length=1)
    repeats: PositiveInt = 3
    cpu_time: bool = False
    engine: Mapping[str, Any] = {}

    @property
    def grid(self) -> Grid:
        """The grid of steps, up to the rows that the largest runs may have."""
        rows = [2**power for power in range(12) if 2**power <= 4 * max(self.limits)]
        contexts = (64, self.max_tokens // 2, self.max_tokens)
        return Grid(model=self.model, rows=tuple(rows), contexts=contexts, prefill=(16, 64, 256))

    @property
    def kv_tokens(self) -> int:
        """Tokens of the whole KV cache."""
        return max(self.limits) * self.max_tokens

    def as_text(self) -> dict[str, str]:
        """Return the settings to compare with those of an earlier run; it may get more repeats."""
        values = self.model_dump(mode="json", exclude={"repeats"})
        return {name: str(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class RunPoint:
    """A run: its method, its limit on concurrent requests, and its share of the KV cache."""

    method: str
    limit: int
    kv_share: float

    @property
    def name(self) -> str:
        """The run in a few words."""
        return f"{self.method}, {self.limit} requests, {self.kv_share:g} of KV"


@dataclass(frozen=True, slots=True)
class TimedRun:
    """Seconds of a run from the first request to the last answer, and its steps."""

    duration_s: float
    steps: int


def validate(settings: ValidationSettings, folder: Path, start_stage: StartStage) -> Report:
    """Do the runs that the folder lacks, predict each, and report the errors.

    Raises EvaluationError for a folder with other settings, a model without control tokens, or a
    virtual run that takes other steps than the real one.
    """
    settings_text = {**settings.as_text(), "machine": machine_name()}
    store = PartStore(folder, settings_text)
    points = list(_points(settings))
    sources: list[str | RunPoint] = [_GRID, *points]
    wanted = [(number, point) for number in range(settings.repeats) for point in sources]
    missing = [(number, point) for number, point in wanted if not store.has(_part(number, point))]
    if missing or not store.has("engine"):
        _measure(missing, settings, store, start_stage)
    samples = {
        point: [
            read_sample(values)
            for number in range(settings.repeats)
            for values in store.find(_part(number, point))["samples"]
        ]
        for point in sources
    }
    measured = {
        point: [
            TimedRun(found["duration_s"], found["steps"])
            for number in range(settings.repeats)
            for found in [store.find(_part(number, point))]
        ]
        for point in points
    }
    name = f"{settings.model} on {machine_name()}"
    costs = {
        fit: fit_samples(
            [each for source in _sources(fit, points) for each in samples[source]],
            name=f"{name}, fitted to {fit}",
            source="apar experiment validate",
            knots=settings.grid.knots if fit == _GRID else None,
        ).costs
        for fit in _FITS
    }
    predicted = predict(settings, points, costs, store.find("engine"), start_stage)
    loads = [store.find(_part(number, point))["load_average"] for number, point in wanted]
    return _report(settings, measured, predicted, costs, statistics.median(loads))


def _points(settings: ValidationSettings) -> Iterator[RunPoint]:
    for limit in sorted(settings.limits):
        for kv_share in settings.kv_shares:
            for method in METHODS:
                yield RunPoint(method, limit, kv_share)


def _sources(fit: str, points: Sequence[RunPoint]) -> list[str | RunPoint]:
    """Return what a fit takes its steps from."""
    if fit == _GRID:
        return [_GRID]
    if fit == "sequential":
        return [point for point in points if point.method == "sequential"]
    least = min(point.limit for point in points)
    return [point for point in points if point.limit == least]


def _measure(
    missing: Sequence[tuple[int, str | RunPoint]],
    settings: ValidationSettings,
    store: PartStore,
    start_stage: StartStage,
) -> None:
    grid = settings.grid
    most_rows = 2 * max(max(grid.rows), 64)
    engine = open_replaying_engine(
        settings.model,
        settings.engine,
        kv_tokens=max(settings.kv_tokens, (settings.max_tokens + 600) * max(grid.rows)),
        max_model_len=settings.max_tokens + 700,
        max_num_seqs=most_rows,
        max_num_batched_tokens=2048,
    )
    try:
        if engine.control_tokens is None:
            raise EvaluationError(f"{settings.model} has no control tokens: it cannot fork")
        answers, _ = load_answers(settings)
        if not store.has("engine"):
            store.add("engine", engine_facts(engine))
        clock = time.process_time if settings.cpu_time else time.perf_counter
        timer = StepTimer(engine, clock)
        done = start_stage("runs", len(missing) + 1)
        # The first steps of an engine allocate and compile.
        replay(engine, answers[:4], settings, RunPoint("eager", 4, 1.0), clock)
        done()
        gc.collect()
        gc.freeze()
        for number, point in missing:
            timer.samples = []
            timer.pause()
            if isinstance(point, RunPoint):
                run = replay(engine, answers, settings, point, clock)
                data: dict[str, Any] = asdict(run)
                found = timer.samples
            else:
                data = {}
                found = [*measure_forks(engine, timer, grid)]
                for context in grid.contexts:
                    for rows in grid.rows:
                        found += measure_point(engine, timer, grid, rows, context)
            data["load_average"] = os.getloadavg()[0]
            data["samples"] = [plain_sample(each) for each in found]
            store.add(_part(number, point), data)
            done()
    finally:
        engine.shutdown()


def replay(
    engine: OfflineEngine,
    answers: Sequence[ReplayAnswer],
    settings: ValidationSettings,
    point: RunPoint,
    clock: Callable[[], float],
) -> TimedRun:
    """Answer all questions, which come at once, and time it.

    Raises EvaluationError if an answer differs from its script.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from apar_core.engine.replay import replay_args

    llm_engine: Any = engine.llm.llm_engine
    scheduler = engine.scheduler
    scheduler.reset_prefix_cache()
    manager = scheduler.kv_cache_manager
    free = manager.block_pool.get_num_free_blocks()
    num_blocks = round(point.kv_share * settings.kv_tokens) // scheduler.block_size
    ballast = manager.block_pool.get_new_blocks(free - num_blocks)
    scheduler.gate.max_requests = point.limit
    forks = point.method != "sequential"
    num_steps = 0
    schedule = scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        step = schedule(*args, **kwargs)
        num_steps += step.total_num_scheduled_tokens > 0
        return step

    scheduler.schedule = counted
    begin_s = clock()
    try:
        for number, answer in enumerate(answers):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=answer.max_tokens,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={
                    **replay_args(answer.scripts(forked=forks)),
                    "apar_enabled": forks,
                },
            )
            prompt = {"prompt_token_ids": list(answer.prompt_ids)}
            llm_engine.add_request(str(number), prompt, params)
        while llm_engine.has_unfinished_requests():
            for output in llm_engine.step():
                answer = answers[int(output.request_id)]
                end_id = answer.flat[-1]
                text = [each for each in output.outputs[0].token_ids if each != end_id]
                if text != answer.flat[:-1]:
                    raise EvaluationError(
                        f"the engine generated another answer than {answer.answer_id!r}"
                    )
        duration_s = clock() - begin_s
        # Steps in flight, where vLLM schedules ahead.
        while llm_engine.engine_core.engine_core.batch_queue or scheduler.has_requests():
            llm_engine.step()
    finally:
        scheduler.schedule = schedule
        scheduler.gate.max_requests = None
        manager.block_pool.free_blocks(ballast)
    return TimedRun(duration_s, num_steps)


def load_answers(settings: ValidationSettings) -> tuple[list[ReplayAnswer], TreeTokens]:
    """Return the answers to replay, and the control tokens that they contain."""
    # Imports transformers, which takes seconds.
    from apar_core.offline.evaluation.replay_text import load_text

    preset = PRESETS.get(settings.model)
    text = load_text(settings.model if preset is None else preset.path)
    lines = read_trace(settings.trace)
    fitting, _ = replay_answers(lines, text, text.tokens, max_tokens=settings.max_tokens)
    if len(fitting) > settings.answers:
        fitting = random.Random(0).sample(fitting, settings.answers)
    return fitting, text.tokens


def engine_facts(engine: OfflineEngine) -> dict[str, Any]:
    """Return what a virtual engine needs to take the same steps."""
    config: Any = engine.llm.llm_engine.vllm_config
    model = config.model_config
    return {
        "config": json.loads(model.hf_config.to_json_string(use_diff=False)),
        "kv_tokens": engine.scheduler.block_size
        * engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
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
    """Do every run in virtual time, by each fit that did not see it."""
    from apar_core.offline.evaluation.replay_text import load_text
    from apar_core.virtual.executor import VirtualClock

    wanted = [
        (fit, point) for fit in _FITS for point in points if point not in _sources(fit, points)
    ]
    done = start_stage("predictions", len(wanted))
    predicted: dict[tuple[str, RunPoint], TimedRun] = {}
    with VirtualEngine(VirtualSpec(costs=costs[_GRID], **facts)) as engine:
        answers, tokens = load_answers(settings)
        own = load_text(str(engine.folder)).tokens
        control = {
            tokens.fork_id: own.fork_id,
            tokens.child_id: own.child_id,
            tokens.end_id: own.end_id,
        }
        answers = [_folded(answer, control) for answer in answers]
        for fit, point in wanted:
            device = engine.device
            device.costs, device.clock, device.free_at_s = costs[fit], VirtualClock(), 0.0
            predicted[fit, point] = replay(engine, answers, settings, point, device.clock)
            done()
    return predicted


def _folded(answer: ReplayAnswer, control: Mapping[int, int]) -> ReplayAnswer:
    """Return an answer in the vocabulary of a virtual engine; only numbers of tokens matter."""

    def fold(ids: Sequence[int]) -> list[int]:
        room = VOCABULARY_SIZE - _FIRST_TEXT_ID
        return [control.get(each, _FIRST_TEXT_ID + each % room) for each in ids]

    return replace(
        answer,
        prompt_ids=tuple(fold(answer.prompt_ids)),
        threads={key: fold(ids) for key, ids in answer.threads.items()},
        flat=fold(answer.flat),
    )


def _part(number: int, point: str | RunPoint) -> str:
    return f"repeat {number}, {point.name if isinstance(point, RunPoint) else point}"


def _report(
    settings: ValidationSettings,
    measured: Mapping[RunPoint, Sequence[TimedRun]],
    predicted: Mapping[tuple[str, RunPoint], TimedRun],
    costs: Mapping[str, StepCosts],
    load: float,
) -> Report:
    columns = [
        Column("run"),
        Column("steps", "d"),
        Column("measured s", ".2f"),
        Column("from", ".2f"),
        Column("to", ".2f"),
    ]
    for fit in _FITS:
        columns += [Column(f"{fit}: s", ".2f"), Column("error %", "+.1f")]
    rows = []
    errors: dict[str, list[float]] = {fit: [] for fit in _FITS}
    same_steps = True
    for point, runs in measured.items():
        durations = [run.duration_s for run in runs]
        middle_s = statistics.median(durations)
        row: list[str | float | None] = [
            point.name, runs[0].steps, middle_s, min(durations), max(durations)
        ]  # fmt: skip
        for fit in _FITS:
            found = predicted.get((fit, point))
            if found is None:
                row += [None, None]
                continue
            error = found.duration_s / middle_s - 1
            errors[fit].append(error)
            row += [found.duration_s, 100 * error]
            same_steps &= all(run.steps == found.steps for run in runs)
        rows.append(tuple(row))
    facts = {
        "Machine": f"measured on {machine_name()}, load average {load:.1f}",
        "Time": "CPU time of the process" if settings.cpu_time else "wall time",
        "Runs": f"{settings.answers} answers of {settings.trace}, "
        f"{settings.repeats} repeats, medians; {settings.kv_tokens} tokens of KV cache",
        "Steps": "as many in virtual time as measured, in every run"
        if same_steps
        else "NOT as many in virtual time as measured",
    }
    for fit in _FITS:
        if errors[fit]:
            within = sum(abs(error) <= 0.1 for error in errors[fit])
            facts[f"Fitted to {fit}"] = (
                f"{within} of {len(errors[fit])} runs within 10%; errors {min(errors[fit]):+.1%} "
                f"to {max(errors[fit]):+.1%}"
            )
    table = ReportTable(
        "runs",
        "Durations of whole runs, measured and predicted",
        tuple(columns),
        tuple(rows),
        note="A dash: the fit saw steps of this run. Errors: predicted over measured, less 1.",
    )
    data = {"costs": {fit: asdict(found) for fit, found in costs.items()}}
    return Report("Predicted durations of whole runs", facts, [table], {}, data)
