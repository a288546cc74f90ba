"""Step times of a real engine on this machine, and the line that the simulation takes for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from apar_core.engine.offline_engine import OfflineEngine
from benchmarks.cluster_simulation.step_times import StepTimes

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
PROMPT_TOKENS = (32, 400)
NEW_TOKENS = 60
_VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One engine step: what it computed, and how long it took with all that surrounds it."""

    rows: int
    attended: int
    prefill_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The line, and how far single steps are from it: median and 90th percentile, relative."""

    times: StepTimes
    num_steps: int
    median_error: float
    p90_error: float


def measure_steps(engine: OfflineEngine) -> list[MeasuredStep]:
    """Run batches of several sizes and prompt lengths; the first batch warms up."""
    steps: list[MeasuredStep] = []
    runs = [(size, length) for size in BATCH_SIZES for length in PROMPT_TOKENS]
    for number, (size, length) in enumerate(track([(8, 32), *runs], transient=True)):
        random = np.random.default_rng(number)
        prompts = [
            {"prompt_token_ids": random.integers(10, _VOCABULARY, length).tolist()}
            for _ in range(size)
        ]
        with recorded_steps(engine) as recorded:
            engine.generate(
                prompts,
                {
                    "temperature": 0.0,
                    "max_tokens": NEW_TOKENS,
                    "ignore_eos": True,
                    "extra_args": {"apar_enabled": False},
                },
            )
        if number > 0:
            steps.extend(recorded)
    return steps


@contextmanager
def recorded_steps(engine: OfflineEngine) -> Iterator[list[MeasuredStep]]:
    """Take down every step that ends before the block does."""
    scheduler: Any = engine.scheduler
    schedule = scheduler.schedule
    steps: list[MeasuredStep] = []
    before: list[tuple[float, int, int, int]] = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        now_s = time.perf_counter()
        if before:
            start_s, rows, attended, prefill = before.pop()
            steps.append(MeasuredStep(rows, attended, prefill, now_s - start_s))
        output = schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        if scheduled:
            attended = prefill = 0
            for name, num_tokens in scheduled.items():
                if num_tokens == 1:
                    attended += scheduler.requests[name].num_computed_tokens
                else:
                    prefill += num_tokens
            before.append((now_s, len(scheduled), attended, prefill))
        return output

    scheduler.schedule = timed
    try:
        yield steps
    finally:
        del scheduler.schedule


def fit_steps(steps: Sequence[MeasuredStep]) -> Fit:
    """Fit by least squares of relative errors, outliers beyond three medians left out once."""
    features = np.array(
        [[1.0, step.rows, step.attended, step.prefill_tokens] for step in steps], dtype=float
    )
    seconds = np.array([step.seconds for step in steps])
    kept = np.ones(len(seconds), dtype=bool)
    errors = np.zeros(len(seconds))
    coefficients = np.zeros(4)
    for _ in range(2):
        weighted = features[kept] / seconds[kept, None]
        coefficients = _non_negative(weighted, np.ones(int(kept.sum())))
        errors = np.abs(features @ coefficients / seconds - 1.0)
        kept = errors <= max(3.0 * float(np.median(errors)), 0.05)
    return Fit(
        StepTimes(*(float(value) for value in coefficients)),
        len(steps),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
    )


def _non_negative(features: Any, targets: Any) -> Any:
    """Least squares in which a negative coefficient becomes zero and the others fit anew."""
    free = list(range(features.shape[1]))
    while True:
        solution = np.linalg.lstsq(features[:, free], targets, rcond=None)[0]
        if solution.min() >= 0 or len(free) == 1:
            break
        del free[int(solution.argmin())]
    coefficients = np.zeros(features.shape[1])
    coefficients[free] = np.maximum(solution, 0.0)
    return coefficients


def print_fit(console: Console, fit: Fit) -> None:
    """Show the line in the units that one thinks in."""
    times = fit.times
    console.print(
        f"step = {times.base_s * 1e3:.3f} ms + {times.row_s * 1e6:.1f} us a row + "
        f"{times.attended_token_s * 1e9:.1f} ns an attended token + "
        f"{times.prefill_token_s * 1e6:.2f} us a prompt token; {fit.num_steps} steps, "
        f"error {fit.median_error:.1%} (median), {fit.p90_error:.1%} (90 %)"
    )
