"""`apar experiment calibrate`: measure the step costs of a real engine and write them to a file.

Every step of a grid of rows, contexts and prefills is a sample: its batch, the time for which the
device was busy, and the time of the engine core's own Python code. Tokens are replayed, as in all
experiments. `StepCosts` are fitted to the samples and written to `step-costs.json`, which other
commands accept as --costs.

All repeats run the same steps, and the shortest time of each step counts: other work on the machine
only slows steps down.

On a CPU the engine waits for the model, so the two times are measured separately. With asynchronous
scheduling, on a GPU, they overlap. The device's time is then the time from output to output, and
the engine core's time is the part of it that is not spent waiting for the output.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import nnls

from apar_core.errors import EvaluationError
from apar_core.reporting import RUN_COLOURS, Report, ReportTable
from apar_core.step_costs.costs import StepBatch, StepCosts
from apar_core.step_costs.files import write_costs
from apar_core.step_costs.fit import StepFit, fit_costs
from cluster.lab.experiments.engine import replaying_engine
from cluster.lab.experiments.parts import PartStore, StartStage
from cluster.lab.experiments.settings import Grid, machine_name
from cluster.lab.plots import panels
from cluster.lab.tables import Value, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from apar_core.engine.offline_engine import OfflineEngine

COSTS_FILE = "step-costs.json"
_FIRST_TEXT_ID = 300
# Steps after a prompt are slower at first, because the prompt's tokens fill the caches.
_WARM_UP_STEPS = 10
_SETTLING_STEPS = 2
_PREFILLS = 2
# Below the resolution of a clock.
_LEAST_S = 1e-9
# Forking requests, forks of each, and tokens of a child: they measure the time of copied blocks,
# and of blocks that several threads read.
_FORKING_ROWS, _FORKS, _CHILD_TOKENS = 8, 6, 40
_FORKING_TOKENS = 400


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step: its batch, and seconds of the device and of the engine core.

    host_s: None if other work came between this step and the previous one.
    """

    batch: StepBatch
    device_s: float
    host_s: float | None


class StepTimer:
    """Samples every step of an engine whose core is in this process.

    With hundreds of rows, counting the reads of a step takes milliseconds. Samples exclude this
    time, but it lengthens the run. Set `is_counting` to False to take no samples.
    """

    def __init__(
        self, engine: OfflineEngine, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.samples: list[StepSample] = []
        self.is_counting = True
        llm_engine: Any = engine.llm.llm_engine
        core = llm_engine.engine_core.engine_core
        self.is_async = core.batch_queue is not None
        self._clock = clock
        self._waited_s = 0.0
        self._last_s = clock()
        self._is_contiguous = False
        executor, scheduler = core.model_executor, core.scheduler
        self._scheduler: Any = scheduler
        executor.execute_model = self._timed_call(executor.execute_model)
        executor.sample_tokens = self._timed_call(executor.sample_tokens)
        update = scheduler.update_from_output

        def timed_update(step: Any, output: Any) -> Any:
            self._add_sample(step)
            return update(step, output)

        scheduler.update_from_output = timed_update

    def pause(self) -> None:
        """Note that other work comes before the engine's next step."""
        self._is_contiguous = False

    def _add_sample(self, step: Any) -> None:
        if not self.is_counting:
            return
        now_s = self._clock()
        passed_s, waited_s = now_s - self._last_s, self._waited_s
        is_contiguous, self._is_contiguous = self._is_contiguous, True
        self._last_s, self._waited_s = now_s, 0.0
        if step.total_num_scheduled_tokens > 0 and (is_contiguous or not self.is_async):
            device_s = passed_s if self.is_async else waited_s
            host_s = passed_s - waited_s if is_contiguous else None
            self.samples.append(StepSample(batch_of(step, self._scheduler), device_s, host_s))
            # Counting blocks is not the engine's work.
            self._last_s = self._clock()

    def _timed_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_async:
                return self._timed(function, *args, **kwargs)
            found = function(*args, **kwargs)
            if hasattr(found, "result"):
                result = found.result
                found.result = lambda *args: self._timed(result, *args)
            return found

        return call

    def _timed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began_s = self._clock()
        try:
            return function(*args, **kwargs)
        finally:
            self._waited_s += self._clock() - began_s


def batch_of(step: Any, scheduler: Any) -> StepBatch:
    """Return the batch of a step of vLLM's scheduler, counted as virtual engines do."""
    num_rows = len(step.num_scheduled_tokens)
    num_tokens = int(step.total_num_scheduled_tokens)
    computed = sum(new.num_computed_tokens for new in step.scheduled_new_reqs)
    computed += sum(step.scheduled_cached_reqs.num_computed_tokens)
    copied = len(step.kv_cache_block_copies or ())
    manager = scheduler.kv_cache_manager
    tables = [manager.get_block_ids(name)[0] for name in step.num_scheduled_tokens]
    repeated = sum(map(len, tables)) - len(set().union(*tables))
    return StepBatch(
        num_rows,
        int(computed) + num_tokens,
        num_tokens - num_rows,
        copied,
        repeated * int(scheduler.block_size),
    )


def calibrate(grid: Grid, folder: Path, start_stage: StartStage) -> Report:
    """Measure the points that the folder does not have, fit step costs, and write their file.

    Raises EvaluationError for a folder with other settings, or a model that cannot be loaded.
    """
    grid = grid.with_weights(folder)
    store = PartStore(folder, {**grid.as_text(), "machine": machine_name()})
    names = [
        (number, rows, context)
        for number in range(grid.repeats)
        for context in grid.contexts
        for rows in grid.rows
    ]
    missing = [point for point in names if not store.has(_part(*point))]
    if missing:
        _measure(missing, grid, store, start_stage)

    def least(part: Callable[[int], str]) -> list[StepSample]:
        return least_samples([read_samples(store, part(each)) for each in range(grid.repeats)])

    points = {
        (rows, context): least(partial(_part, rows=rows, context=context))
        for _, rows, context in names
    }
    samples = [sample for found in points.values() for sample in found] + least(_forks_part)
    name = f"{grid.model} on {machine_name()}"
    source = f"apar experiment calibrate, {name}"
    fit = fit_samples(samples, name=name, source=source, on_gpu=on_gpu(), knots=grid.knots)
    write_costs(fit.costs, folder / COSTS_FILE)
    is_async = bool(store.find(_forks_part(0))["is_async"])
    return _report(grid, fit, points, folder, schedules_ahead=is_async)


def least_samples(repeats: Sequence[Sequence[StepSample]]) -> list[StepSample]:
    """Return the shortest times of each step over repeats.

    If the repeats ran different steps, all samples are returned unchanged.
    """
    batches = [[sample.batch for sample in samples] for samples in repeats]
    if any(each != batches[0] for each in batches):
        return [sample for samples in repeats for sample in samples]
    least: list[StepSample] = []
    for same in zip(*repeats, strict=True):
        hosts = [sample.host_s for sample in same if sample.host_s is not None]
        device_s = min(sample.device_s for sample in same)
        least.append(StepSample(same[0].batch, device_s, min(hosts, default=None)))
    return least


def on_gpu() -> bool:
    """Return whether engines on this machine use a GPU."""
    # Imports torch, which takes seconds.
    from torch.cuda import is_available

    return bool(is_available())


def fit_samples(
    samples: Sequence[StepSample],
    *,
    name: str,
    source: str,
    on_gpu: bool = False,
    knots: Sequence[int] | None = None,
) -> StepFit:
    """Fit step costs to samples, the engine core's own time included.

    on_gpu: whether the samples are from a GPU. If no sample has threads that share KV blocks,
        reading a block again is assumed to be free on a CPU.
    knots: tokens per step between which the time of matrix products is linear; those above the
        largest step are ignored.

    Raises StepCostsError if the samples do not determine the costs.
    """
    typical = _typical(samples)
    tokens = [batch.tokens for batch, _ in typical]
    knots = _knots(tokens) if knots is None else [each for each in knots if each <= max(tokens)]
    fit = fit_costs(typical, name=name, source=source, knots=knots, repeated_are_free=not on_gpu)
    base_s, row_s = _host_line(samples)
    return replace(fit, costs=replace(fit.costs, host_base_s=base_s, host_row_s=row_s))


def _typical(samples: Sequence[StepSample]) -> list[tuple[StepBatch, float]]:
    """Return a mean step for each kind of step, so that frequent kinds do not outweigh others.

    Steps of a kind have the same rows and copied blocks, and about the same tokens.
    """
    kinds: dict[tuple[int, ...], list[StepSample]] = defaultdict(list)
    for sample in samples:
        batch = sample.batch
        tokens = (batch.prefill_tokens, batch.attended_tokens, batch.repeated_tokens)
        kinds[(batch.rows, batch.copied_blocks, *map(_bucket, tokens))].append(sample)
    typical: list[tuple[StepBatch, float]] = []
    for (rows, copied, *_), found in kinds.items():
        attended, prefill, repeated = (
            round(statistics.fmean(getattr(sample.batch, name) for sample in found))
            for name in ("attended_tokens", "prefill_tokens", "repeated_tokens")
        )
        seconds = _mean_s([sample.device_s for sample in found])
        typical.append((StepBatch(rows, attended, prefill, copied, repeated), seconds))
    return typical


def _mean_s(times: Sequence[float]) -> float:
    """Return the mean of times, each clipped at twice the median.

    A run's duration is a sum of steps, so slow steps count, but interruptions should not.
    """
    most_s = 2 * statistics.median(times)
    return statistics.fmean(min(seconds, most_s) for seconds in times)


def _knots(tokens: Sequence[int]) -> list[int]:
    """Return token counts of samples, each at least 40% larger than the previous one."""
    knots: list[int] = []
    for number in sorted(set(tokens)):
        if not knots or number >= 1.4 * knots[-1]:
            knots.append(number)
    return knots


def _bucket(tokens: int) -> int:
    """Return a logarithmic bucket: one higher for every 20% more tokens."""
    return round(math.log(tokens + 1) / math.log(1.2))


def _host_line(samples: Sequence[StepSample]) -> tuple[float, float]:
    """Fit a line to the engine core's median times by rows, minimizing relative errors."""
    by_rows: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.host_s is not None:
            by_rows[sample.batch.rows].append(sample.host_s)
    rows = np.array(sorted(by_rows), dtype=float)
    seconds = np.array([statistics.median(by_rows[int(number)]) for number in rows])
    weights = np.sqrt([len(by_rows[int(number)]) for number in rows]) / np.maximum(
        seconds, _LEAST_S
    )
    features = np.stack([np.ones_like(rows), rows], axis=1)
    (base_s, row_s), _ = nnls(features * weights[:, None], seconds * weights)
    return float(base_s), float(row_s)


def calibrated_engine(
    model: str, engine_args: Mapping[str, Any], *, kv_tokens: int, **limits: int
) -> OfflineEngine:
    """Return an engine to measure; `limits` are arguments of vLLM.

    On a CPU, its KV cache holds `kv_tokens`; on a GPU, the memory decides.
    """
    arguments: dict[str, Any] = {**limits, **engine_args}
    if on_gpu():
        return replaying_engine(model, arguments)
    defaults = {"block_size": 32, "enforce_eager": True}
    return replaying_engine(model, {**defaults, **arguments}, kv_tokens)


def _open_engine(grid: Grid) -> OfflineEngine:
    """Return an engine with room for the largest points of a grid."""
    most_rows, longest = max(grid.rows), max(grid.contexts)
    return calibrated_engine(
        grid.model,
        grid.engine,
        # The last block of a row is only partly filled.
        kv_tokens=most_rows * (longest + _room_tokens(grid) + 128) + max(grid.prefill),
        max_model_len=max(longest, *grid.prefill) + max(_room_tokens(grid), 2 * _FORKING_TOKENS),
        max_num_seqs=max(2 * most_rows, 2 * _FORKING_ROWS * _FORKS),
        max_num_batched_tokens=max(2048, 2 * most_rows + max(grid.prefill)),
    )


def _room_tokens(grid: Grid) -> int:
    """Return how many tokens a row may generate while a point is measured."""
    # While the prompts of all rows are computed, the first rows already generate tokens.
    prompts = max(grid.rows) * max(grid.contexts) // 2048 + max(grid.rows)
    after = (1 + _SETTLING_STEPS) * _PREFILLS * len(grid.prefill)
    return min(prompts, 256) + grid.steps + _WARM_UP_STEPS + after + 8


def _measure(
    points: Sequence[tuple[int, int, int]], grid: Grid, store: PartStore, start_stage: StartStage
) -> None:
    engine = _open_engine(grid)
    try:
        timer = StepTimer(engine)
        done = start_stage("points of the grid", len(points) + 1)
        # The first steps of an engine allocate and compile.
        measure_point(engine, timer, grid, grid.rows[0], grid.contexts[0])
        done()
        for number, rows, context in points:
            if not store.has(_forks_part(number)):
                values = [plain_sample(each) for each in measure_forks(engine, timer, grid)]
                store.add(_forks_part(number), {"samples": values, "is_async": timer.is_async})
            if problem := lack_of_room(engine, grid, rows, context):
                raise EvaluationError(problem)
            found = measure_point(engine, timer, grid, rows, context)
            store.add(
                _part(number, rows, context), {"samples": [plain_sample(each) for each in found]}
            )
            done()
    finally:
        engine.shutdown()


def lack_of_room(engine: OfflineEngine, grid: Grid, rows: int, context: int) -> str | None:
    """Return why an engine cannot run a point of the grid; None if it can."""
    scheduler = engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    room = pool.get_num_free_blocks() * scheduler.block_size
    wanted = rows * (context + _room_tokens(grid))
    if wanted > room:
        return (
            f"{rows} rows of {context} tokens need {wanted} tokens of KV cache, the engine has "
            f"{room}: give smaller --rows or --contexts; points measured so far are kept in --out"
        )
    if rows + 1 > scheduler.max_num_running_reqs:
        return (
            f"{rows} rows need max_num_seqs of {rows + 1}, the engine has "
            f"{scheduler.max_num_running_reqs}: give smaller --rows or another --engine"
        )
    return None


def measure_point(
    engine: OfflineEngine, timer: StepTimer, grid: Grid, rows: int, context: int
) -> list[StepSample]:
    """Measure steps with a number of rows at one context, with and without prefill."""
    llm_engine: Any = engine.llm.llm_engine
    scheduler = engine.scheduler
    scheduler.reset_prefix_cache()
    timer.samples = []
    timer.pause()
    for number in range(rows):
        _add(engine, f"row-{number}", _prompt(number, context), _room_tokens(grid))
    while len(scheduler.running) < rows or any(
        request.num_output_tokens == 0 for request in scheduler.running
    ):
        llm_engine.step()
        if len(scheduler.requests) < rows:
            raise EvaluationError(f"the engine cannot run {rows} rows of {context} tokens")
    # The steps of the prompts are samples too.
    found = timer.samples
    timer.samples = []
    for _ in range(_WARM_UP_STEPS):
        llm_engine.step()
    timer.samples = []
    for _ in range(grid.steps):
        llm_engine.step()
    found += timer.samples
    for index, tokens in enumerate(grid.prefill * _PREFILLS):
        timer.samples = []
        timer.pause()
        _add(engine, f"prompt-{index}", _prompt(rows + index, tokens), 1)
        for _ in range(1 + _SETTLING_STEPS):
            llm_engine.step()
        found += [sample for sample in timer.samples if sample.batch.prefill_tokens]
    _end_all(engine)
    return found


def measure_forks(engine: OfflineEngine, timer: StepTimer, grid: Grid) -> list[StepSample]:
    """Measure steps in which threads fork and share KV blocks; none without control tokens.

    Requests with the shortest and with the longest context fork, so that the fit can distinguish
    first reads from repeated reads.
    """
    control = engine.control_tokens
    if control is None:
        return []
    script = [_FIRST_TEXT_ID]
    for _ in range(_FORKS):
        script += [control.fork_id, *range(_FIRST_TEXT_ID, _FIRST_TEXT_ID + 5)]
    child = [*range(_FIRST_TEXT_ID, _FIRST_TEXT_ID + _CHILD_TOKENS), engine.tokenizer.eos_token_id]
    scripts = {"": script, **{str(number): child for number in range(_FORKS)}}
    found: list[StepSample] = []
    for context in (min(grid.contexts), max(grid.contexts)):
        engine.scheduler.reset_prefix_cache()
        timer.samples = []
        timer.pause()
        for number in range(_FORKING_ROWS):
            prompt = _prompt(number, context + number)
            _add(engine, f"forking-{number}", prompt, _FORKING_TOKENS, scripts=scripts)
        llm_engine: Any = engine.llm.llm_engine
        while llm_engine.has_unfinished_requests():
            llm_engine.step()
        _end_all(engine)
        found += timer.samples
    return found


def _add(
    engine: OfflineEngine,
    name: str,
    prompt: list[int],
    max_tokens: int,
    scripts: Mapping[str, Sequence[int]] | None = None,
) -> None:
    from vllm import SamplingParams

    from apar_core.engine.replay import replay_args

    own = {"": [_FIRST_TEXT_ID + index % 100 for index in range(max_tokens)]}
    extra_args = {**replay_args(scripts or own), "apar_enabled": scripts is not None}
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=scripts is None,
        detokenize=False,
        extra_args=extra_args,
    )
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)


def _prompt(number: int, tokens: int) -> list[int]:
    # Prompts share no prefix, and thus no block.
    return [
        _FIRST_TEXT_ID + (number * 7919 + place * (place + number)) % 1000
        for place in range(tokens)
    ]


def _end_all(engine: OfflineEngine) -> None:
    llm_engine: Any = engine.llm.llm_engine
    llm_engine.abort_request(list(llm_engine.output_processor.request_states), True)
    core = llm_engine.engine_core.engine_core
    while engine.scheduler.has_requests() or core.batch_queue:
        llm_engine.step()


def _forks_part(number: int) -> str:
    return f"repeat {number}, forks"


def _part(number: int, rows: int, context: int) -> str:
    return f"repeat {number}, {rows} rows, context {context}"


def plain_sample(sample: StepSample) -> list[float | None]:
    """Return a sample as values for JSON."""
    batch = sample.batch
    counts = (batch.rows, batch.attended_tokens, batch.prefill_tokens, batch.copied_blocks)
    return [*counts, batch.repeated_tokens, sample.device_s, sample.host_s]


def read_samples(store: PartStore, part: str) -> list[StepSample]:
    """Return the samples of a part, written by `plain_sample`."""
    return [
        StepSample(StepBatch(*counts), device_s, host_s)
        for *counts, device_s, host_s in store.find(part)["samples"]
    ]


def _report(
    grid: Grid,
    fit: StepFit,
    points: Mapping[tuple[int, int], Sequence[StepSample]],
    folder: Path,
    *,
    schedules_ahead: bool,
) -> Report:
    costs = fit.costs
    decoding = [
        (rows, context, [each for each in found if not each.batch.prefill_tokens])
        for (rows, context), found in points.items()
    ]
    prefill = [
        (rows, tokens, [each for each in found if _computes_prompt(each, rows, tokens)])
        for (rows, context), found in points.items()
        if context == min(grid.contexts)
        for tokens in grid.prefill
    ]
    title = f"Steps with a prompt beside rows of {min(grid.contexts)} tokens"
    return Report(
        f"Step costs, measured: {costs.name}",
        {
            "Costs": f"{folder / COSTS_FILE}: pass it to other commands as --costs",
            "Engine": "schedules ahead: the device's time is from output to output"
            if schedules_ahead
            else "waits for each step",
            "Samples": f"{fit.samples} steps, {fit.outliers} of them without weight",
            "Error of the fit": f"{fit.total_error:+.1%} of the sum of all steps; single steps: "
            f"median {fit.median_error:.1%}, 90% of them below {fit.p90_error:.1%}",
            "Attention": _attention(costs),
            "Copied KV block": f"{1e6 * costs.copied_block_s:.3g} us",
            "Engine core": f"{1e6 * costs.host_base_s:.0f} us per step and "
            f"{1e6 * costs.host_row_s:.1f} us per row",
        },
        [
            _table("decoding", "Decoding steps", "context", decoding, costs),
            _table("prefill", title, "prompt tokens", prefill, costs),
        ],
        {"steps": _figure(decoding, costs)},
        {"costs": folder.joinpath(COSTS_FILE).name, "total_error": fit.total_error},
    )


def _attention(costs: StepCosts) -> str:
    text = f"{1e9 * costs.attended_token_s:.3g} ns per token of KV cache"
    if costs.repeated_token_s is None:
        return text
    again_ns = 1e9 * costs.repeated_token_s
    return f"{text}, {again_ns:.3g} ns if another row has read it in the same step"


def _computes_prompt(sample: StepSample, rows: int, tokens: int) -> bool:
    return sample.batch.rows == rows + 1 and sample.batch.prefill_tokens == tokens - 1


Steps = tuple[int, int, Sequence[StepSample]]
"""Samples with a number of rows, and a context or a length of a prompt."""


def _table(
    name: str, title: str, second: str, groups: Sequence[Steps], costs: StepCosts
) -> ReportTable:
    def host_ms(samples: Sequence[StepSample]) -> float | None:
        hosts = [each.host_s for each in samples if each.host_s is not None]
        return 1000 * statistics.median(hosts) if hosts else None

    return table_of(
        name,
        title,
        [each for each in groups if each[2]],
        (
            Value("rows", "d", lambda each: each[0]),
            Value(second, "d", lambda each: each[1]),
            Value("measured ms", ".2f", lambda each: _measured_ms(each[2])),
            Value("fitted ms", ".2f", lambda each: _fitted_ms(each[2], costs)),
            Value(
                "error %",
                "+.1f",
                lambda each: 100 * (_fitted_ms(each[2], costs) / _measured_ms(each[2]) - 1),
            ),
            Value("engine core ms", ".2f", lambda each: host_ms(each[2])),
        ),
        note="Medians over steps, each with the shortest time of its repeats.",
    )


def _measured_ms(samples: Sequence[StepSample]) -> float:
    return 1000 * statistics.median(each.device_s for each in samples)


def _fitted_ms(samples: Sequence[StepSample], costs: StepCosts) -> float:
    return 1000 * statistics.median(costs.device_s(each.batch) for each in samples)


def _figure(decoding: Sequence[Steps], costs: StepCosts) -> Figure:
    """Draw the time of decoding steps by rows, with one line per context."""
    with panels(1, 1, (7, 4.2)) as (figure, ((axes,),)):
        for index, context in enumerate(sorted({context for _, context, _ in decoding})):
            colour = RUN_COLOURS[index % len(RUN_COLOURS)]
            found = [(rows, samples) for rows, other, samples in decoding if other == context]
            rows = [number for number, _ in found]
            axes.plot(rows, [_measured_ms(each) for _, each in found], "o", color=colour)
            fitted = [_fitted_ms(each, costs) for _, each in found]
            axes.plot(rows, fitted, "-", color=colour, label=f"context {context}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(
            xlabel="rows",
            ylabel="ms",
            title="Decoding steps: measured (points) and fitted (lines)",
        )
        axes.legend(frameon=False)
    return figure
