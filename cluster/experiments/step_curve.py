"""How long a step of a model takes with so many rows: where memory ends and computation begins."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apar_core.reporting import Column, ReportTable
from cluster.experiments.experiment_engine import Conditions, ExperimentEngine

_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class CurveLoad:
    """Numbers of rows, prompt tokens of each row, and steps that are timed at each number."""

    row_counts: tuple[int, ...]
    context_tokens: int = 64
    steps: int = 20


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Seconds of a decoding step with so many rows: median, and quartiles."""

    rows: int
    attended_per_row: int
    step_s: float
    p25_s: float
    p75_s: float


@dataclass(frozen=True, slots=True)
class StepCurve:
    """The points, and the line through them: `fixed_s` for any step, `row_s` for each row more.

    At `knee_rows` the rows take as long as what every step costs: below it a row more is nearly
    free, far beyond it throughput no longer grows.
    """

    points: tuple[CurvePoint, ...]
    fixed_s: float
    row_s: float

    @property
    def knee_rows(self) -> float | None:
        """Rows that take as long as the fixed part of a step; None if one of both is nothing."""
        if self.fixed_s <= 0 or self.row_s <= 0:
            return None
        return self.fixed_s / self.row_s


def measure_point(engine: ExperimentEngine, rows: int, load: CurveLoad) -> CurvePoint:
    """Time decoding steps of so many rows."""
    times = _step_times(engine, rows, load.context_tokens, load.steps)
    lower, middle, upper = statistics.quantiles(times, n=4, method="inclusive")
    return CurvePoint(rows, load.context_tokens, middle, lower, upper)


def fit(points: Sequence[CurvePoint]) -> StepCurve:
    """Lay a line through the points, each weighted by its relative error."""
    rows = np.array([point.rows for point in points], dtype=float)
    seconds = np.array([point.step_s for point in points])
    features = np.stack([np.ones_like(rows), rows], axis=1) / seconds[:, None]
    (fixed_s, row_s), *_ = np.linalg.lstsq(features, np.ones_like(rows), rcond=None)
    return StepCurve(tuple(points), float(fixed_s), float(row_s))


def curve_table(curve: StepCurve) -> ReportTable:
    """Return the points, and what the line says at each."""
    columns = (
        Column("rows", "d"),
        Column("step ms", ".2f"),
        Column("p25 ms", ".2f"),
        Column("p75 ms", ".2f"),
        Column("line ms", ".2f"),
        Column("tokens/s", ".0f"),
    )
    rows = tuple(
        (
            point.rows,
            1000 * point.step_s,
            1000 * point.p25_s,
            1000 * point.p75_s,
            1000 * (curve.fixed_s + curve.row_s * point.rows),
            point.rows / point.step_s,
        )
        for point in curve.points
    )
    return ReportTable(
        "step-curve",
        "A decoding step by its rows",
        columns,
        rows,
        note="Medians and quartiles; the line is laid through the medians by relative errors.",
    )


def _step_times(
    engine: ExperimentEngine, rows: int, context_tokens: int, steps: int
) -> list[float]:
    """Seconds of steps in which all rows decode, prompts computed before."""
    from vllm import SamplingParams

    engine.prepare(Conditions())
    llm_engine = engine.llm_engine
    params: dict[str, Any] = {
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
        "max_tokens": steps + _WARM_UP_STEPS + rows,
        "extra_args": {"apar_enabled": False},
    }
    for index in range(rows):
        # Prompts of their own: nothing is shared between rows.
        prompt = [8 + (index * 7919 + place) % 4000 for place in range(context_tokens)]
        prompt[0] = 8 + index % 4000
        llm_engine.add_request(
            f"row-{index}", {"prompt_token_ids": prompt}, SamplingParams(**params)
        )
    while len(engine.scheduler.running) < rows or _computes_prompts(engine):
        llm_engine.step()
    for _ in range(_WARM_UP_STEPS):
        llm_engine.step()
    times = []
    for _ in range(steps):
        start_s = time.perf_counter()
        llm_engine.step()
        times.append(time.perf_counter() - start_s)
    engine.abort_all()
    return times


def _computes_prompts(engine: ExperimentEngine) -> bool:
    return any(request.num_output_tokens == 0 for request in engine.scheduler.running)
