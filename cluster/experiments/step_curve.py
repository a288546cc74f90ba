"""How long a step of a model takes with so many rows: where memory ends and computation begins."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.experiments.experiment_engine import Conditions, ExperimentEngine

CURVE = "step-curve"
_WARM_UP_STEPS = 2


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
    def knee_rows(self) -> float:
        """Rows that take as long as the fixed part of a step."""
        return self.fixed_s / self.row_s


def measure_curve(
    engine: ExperimentEngine,
    row_counts: Sequence[int],
    *,
    context_tokens: int,
    steps: int,
    done: Callable[[], None],
) -> StepCurve:
    """Time decoding steps of rows that each attend to about `context_tokens` tokens."""
    points = []
    for rows in row_counts:
        times = _step_times(engine, rows, context_tokens, steps)
        lower, middle, upper = statistics.quantiles(times, n=4, method="inclusive")
        points.append(CurvePoint(rows, context_tokens, middle, lower, upper))
        done()
    return fit(points)


def fit(points: Sequence[CurvePoint]) -> StepCurve:
    """Lay a line through the points, each weighted by its relative error."""
    rows = np.array([point.rows for point in points], dtype=float)
    seconds = np.array([point.step_s for point in points])
    features = np.stack([np.ones_like(rows), rows], axis=1) / seconds[:, None]
    (fixed_s, row_s), *_ = np.linalg.lstsq(features, np.ones_like(rows), rcond=None)
    return StepCurve(tuple(points), float(fixed_s), float(row_s))


def write_curve(curve: StepCurve, folder: Path) -> list[Path]:
    """Write points and line as JSON, and the plot."""
    from apar_core.evaluation.speed_plots import save_figure
    from cluster.experiments.plots import step_figure

    folder.mkdir(parents=True, exist_ok=True)
    data = {**asdict(curve), "knee_rows": curve.knee_rows}
    path = folder / f"{CURVE}.json"
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return [path, *save_figure(step_figure(curve), folder / CURVE)]


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
