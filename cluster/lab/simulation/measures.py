"""Latencies, goodput and balance of simulated runs, with confidence intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from apar_core.intervals import half_width
from cluster.lab.simulation.cluster import ClusterRun, Outcome

# Measured share of the requests, by arrival: the first fill the cluster, the last see it drain.
MEASURED = (0.25, 0.9)


# The objectives of `goodput`: time to the first token, and total latency per text token.
FIRST_TOKEN_S, TOKEN_S = 2.0, 0.05
SLO = (
    f"first token within {FIRST_TOKEN_S:g} s, {1000 * TOKEN_S:g} ms per text token, waiting "
    "included"
)


@dataclass(frozen=True, slots=True)
class Measures:
    """Measures of the requests in the middle of a run; times in seconds from arrival.

    token_*: latency per text token. step_*: device time of a step, weighted by rows.
    goodput: share of requests within the objectives; failed requests are not.
    failed: share of requests refused or given up.
    imbalance: coefficient of variation of the threads per replica. max_over_mean: threads of the
        fullest replica over the mean. Both are averaged over time.
    cached: share of prompt tokens found in a prefix cache.
    preemptions: per thousand requests. rows: mean rows per step.
    """

    mean_s: float
    p50_s: float
    p99_s: float
    first_token_p50_s: float
    first_token_p99_s: float
    token_p50_s: float
    token_p99_s: float
    step_p50_s: float
    step_p99_s: float
    goodput: float
    failed: float
    imbalance: float
    max_over_mean: float
    cached: float
    preemptions: float
    rows: float


NAMES = tuple(field.name for field in fields(Measures))


def middle(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """Return the outcomes of the measured requests of a run."""
    low, high = MEASURED
    return outcomes[int(low * len(outcomes)) : math.ceil(high * len(outcomes))]


def measure(run: ClusterRun, window_s: tuple[float, float] | None = None) -> Measures:
    """Measure the requests that arrived in a window, by default in the middle of the run."""
    outcomes = middle(run.outcomes)
    if window_s is not None:
        low, high = window_s
        outcomes = [each for each in run.outcomes if low <= each.request.arrival_s < high]
    served = [each for each in outcomes if each.error is None]
    arrivals = _array(each.request.arrival_s for each in served)
    latency = _array(each.end_s for each in served) - arrivals
    first = _array(each.first_token_s for each in served) - arrivals
    per_token = latency / _array(each.request.answer.text_tokens for each in served)
    good = (first <= FIRST_TOKEN_S) & (per_token <= TOKEN_S)
    times = [each.request.arrival_s for each in outcomes]
    cv, fullest = _imbalance(run, times[0], times[-1])
    prompt_tokens = sum(each.request.prompt_tokens for each in served)
    return Measures(
        float(latency.mean()),
        *_quantiles(latency),
        *_quantiles(first),
        *_quantiles(per_token),
        *_step_quantiles(run.step_rows),
        goodput=float(good.sum()) / len(outcomes),
        failed=1 - len(served) / len(outcomes),
        imbalance=cv,
        max_over_mean=fullest,
        cached=sum(each.cached_tokens for each in served) / max(1, prompt_tokens),
        preemptions=1000.0 * run.preemptions / len(run.outcomes),
        rows=run.rows / max(1, run.steps),
    )


def _array(values: Any) -> npt.NDArray[np.float64]:
    return np.array(list(values), dtype=float)


def _quantiles(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    return float(np.quantile(values, 0.5)), float(np.quantile(values, 0.99))


def _imbalance(run: ClusterRun, begin_s: float, end_s: float) -> tuple[float, float]:
    variations, fullest = [], []
    for sample in run.samples:
        if begin_s <= sample.at_s <= end_s and any(sample.threads):
            threads = _array(sample.threads)
            variations.append(threads.std() / threads.mean())
            fullest.append(threads.max() / threads.mean())
    if not variations:
        return 0.0, 1.0
    return float(np.mean(variations)), float(np.mean(fullest))


def _step_quantiles(weights: Mapping[float, int]) -> tuple[float, float]:
    seconds = sorted(weights)
    shares = np.cumsum([weights[each] for each in seconds])
    places = np.searchsorted(shares, np.array([0.5, 0.99]) * shares[-1])
    return seconds[places[0]], seconds[places[1]]


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over seeds, and half-widths of their 95% confidence intervals (0 for one seed)."""

    mean: Measures
    half_width: Measures
    num_seeds: int


def summarise(measured: Sequence[Measures]) -> Summary:
    """Combine the seeds of one setting."""
    table = np.array([[getattr(each, name) for name in NAMES] for each in measured])
    return Summary(
        Measures(*table.mean(axis=0).tolist()),
        Measures(*(half_width(column) for column in table.T)),
        len(measured),
    )


def ratio(
    over: Sequence[Measures], under: Sequence[Measures], get: Callable[[Measures], float]
) -> tuple[float, float]:
    """Return the mean ratio of two settings with the same seeds, and its 95% half-width."""
    ratios = np.array([get(a) / get(b) for a, b in zip(over, under, strict=True)])
    return float(ratios.mean()), half_width(ratios)
