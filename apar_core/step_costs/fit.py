"""Fits step costs to measured engine steps.

    fit = fit_costs([(StepBatch(rows=8, attended_tokens=900), 0.0123), ...], name=..., source=...)
    write_costs(fit.costs, path)

Each sample is what a step computed and its duration in seconds. Samples should vary rows, context
and prefill independently: attended tokens that grow with the rows at one context length leave
`attended_token_s` undetermined. `repeated_token_s` is fitted if threads of some steps shared KV
blocks. The fit gives the device's terms. A caller that measured the engine
core's own time apart adds it: `dataclasses.replace(fit.costs, host_base_s=..., host_row_s=...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import nnls

from apar_core.errors import StepCostsError
from apar_core.step_costs.costs import Kind, StepBatch, StepCosts, split_curve

MOST_KNOTS = 8
_ABSOLUTE_ROUNDS = 12
_TRIMMED_ROUNDS = 12
# Tukey's biweight: 95% efficiency under normal noise, no weight beyond 4.685 deviations.
_TUKEY = 4.685
_MAD_OF_NORMAL = 1.4826
# Timers and a piecewise linear curve are not exact to a percent: no outlier below a few of them.
_LEAST_SCALE = 0.01


@dataclass(frozen=True, slots=True)
class StepFit:
    """Fitted costs and how far they are from the samples, all of them, outliers included.

    total_error: predicted over measured sum of all durations, less 1. Positive: predicted longer.
    median_error, p90_error: of the absolute relative errors of single steps.
    outliers: samples that the fit gave no weight.
    """

    costs: StepCosts
    samples: int
    outliers: int
    total_error: float
    median_error: float
    p90_error: float


def fit_costs(
    samples: Sequence[tuple[StepBatch, float]],
    *,
    name: str,
    source: str,
    kind: Kind = "measured",
    knots: Sequence[int] | None = None,
    repeated_are_free: bool = False,
) -> StepFit:
    """Fit non-negative costs to relative errors, robust against up to a third of slow outliers.

    The time of matrix products is piecewise linear in the tokens with the given `knots`, by default
    up to eight of the samples' own numbers of tokens in geometric steps. It never falls. Beyond the
    last knot it goes on with the slope of the last piece. Sampling per row is told from tokens only
    if some samples have prefill tokens. If no sample read a KV block twice, `repeated_are_free`
    decides whether that takes no time, as on a CPU, whose caches hold the KV blocks of a step, or
    as long as the first reading. Raises StepCostsError for too few or invalid samples.
    """
    seconds = np.array([duration for _, duration in samples], dtype=float)
    if not samples or not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise StepCostsError("step costs are fitted to samples with durations above 0 seconds")
    batches = [batch for batch, _ in samples]
    points = _knots(batches, knots)
    features = _features(batches, points)
    distinct, unknown = len(set(batches)), int(np.sum(features.any(axis=0)))
    if distinct < unknown:
        raise StepCostsError(
            f"{distinct} different steps do not determine {unknown} costs: measure more "
            "batch sizes and contexts"
        )
    parts, weights = _robust(features / seconds[:, None])
    costs = _costs(parts, points, name, kind, source)
    if not any(batch.repeated_tokens for batch in batches):
        costs = replace(costs, repeated_token_s=0.0 if repeated_are_free else None)
    predicted = np.array([costs.device_s(batch) for batch in batches])
    errors = np.abs(predicted / seconds - 1)
    return StepFit(
        costs=costs,
        samples=len(samples),
        outliers=int(np.sum(weights == 0)),
        total_error=float(predicted.sum() / seconds.sum() - 1),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
    )


def _knots(batches: Sequence[StepBatch], given: Sequence[int] | None) -> list[int]:
    if given is not None:
        if list(given) != sorted(set(given)) or not given or given[0] < 1:
            raise StepCostsError(f"knots must be increasing numbers of tokens, not {list(given)}")
        return list(given)
    seen = np.unique([batch.tokens for batch in batches])
    if len(seen) <= MOST_KNOTS:
        return [int(tokens) for tokens in seen]
    wanted = np.geomspace(seen[0], seen[-1], MOST_KNOTS)
    nearest = np.abs(np.log(seen)[None, :] - np.log(wanted)[:, None]).argmin(axis=1)
    return [int(tokens) for tokens in np.unique(seen[nearest])]


def _features(batches: Sequence[StepBatch], knots: Sequence[int]) -> Any:
    """Return a matrix [sample, cost]: constant, a rise per piece, then what `_costs` takes.

    A rise is the part of a piece between two knots that a step's tokens have passed, above 1 for
    the last one beyond its end.
    """
    tokens = np.array([batch.tokens for batch in batches], dtype=float)
    columns = [np.ones_like(tokens)]
    for number, (low, high) in enumerate(pairwise(knots), start=2):
        last = np.inf if number == len(knots) else 1.0
        columns.append(np.clip((tokens - low) / (high - low), 0.0, last))
    repeated = np.array([batch.repeated_tokens for batch in batches], dtype=float)
    attended = np.array([batch.attended_tokens for batch in batches], dtype=float)
    columns += [attended - repeated, repeated]
    has_prefill = any(batch.prefill_tokens for batch in batches)
    rows = [batch.rows if has_prefill else 0 for batch in batches]
    columns.append(np.array(rows, dtype=float))
    columns.append(np.array([batch.copied_blocks for batch in batches], dtype=float))
    return np.stack(columns, axis=1)


def _robust(features: Any) -> tuple[Any, Any]:
    """Return non-negative costs whose products with the features are close to 1, and weights.

    The first rounds minimize absolute errors. The others give weights by Tukey's biweight, which
    is 0 for outliers.
    """
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    scaled = features / scale
    weights = np.ones(len(scaled))
    parts = np.zeros(scaled.shape[1])
    for number in range(1 + _ABSOLUTE_ROUNDS + _TRIMMED_ROUNDS):
        root = np.sqrt(weights)
        parts, _ = nnls(scaled * root[:, None], root)
        errors = np.abs(scaled @ parts - 1)
        deviation = max(_MAD_OF_NORMAL * float(np.median(errors)), _LEAST_SCALE)
        if number < _ABSOLUTE_ROUNDS:
            weights = 1 / np.maximum(errors, deviation / 10)
        else:
            weights = np.clip(1 - (errors / (_TUKEY * deviation)) ** 2, 0, None) ** 2
    return parts / scale, weights


def _costs(parts: Any, knots: Sequence[int], name: str, kind: Kind, source: str) -> StepCosts:
    constant, *rises = (float(part) for part in parts[: len(knots)])
    attended_s, repeated_s, row_s, copied_s = (float(part) for part in parts[len(knots) :])
    seconds = [constant]
    for rise in rises:
        seconds.append(seconds[-1] + rise)
    launch_s, matrix_s = split_curve(list(zip(knots, seconds, strict=True)))
    return StepCosts(
        name=name,
        kind=kind,
        source=source,
        matrix_s=matrix_s,
        attended_token_s=attended_s,
        repeated_token_s=repeated_s,
        launch_s=launch_s,
        copied_block_s=copied_s,
        row_s=row_s,
    )
