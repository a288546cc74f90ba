"""What a simulated run was like for its clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from benchmarks.cluster_simulation.cluster import Run

# Of the requests by arrival; the first fill the cluster, the last see it run empty.
MEASURED = (0.25, 0.9)
# Student's t for 95 %, by the number of seeds less one.
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer keeps: seconds to the first token, and in all per token of text."""

    first_token_s: float = 2.0
    token_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Measures:
    """Latencies in seconds from a request's arrival; `token` ones are divided by its text tokens.

    `goodput` is the share of requests that keep the SLO. `imbalance` is the coefficient of
    variation of the replicas' threads, `max_over_mean` the fullest against the mean, both averaged
    over time. `step` is the time between two tokens of a thread, `cached` the share of prompt
    tokens found in a prefix cache, `preemptions` those of a thousand requests.
    """

    p50_s: float
    p99_s: float
    first_token_p50_s: float
    first_token_p99_s: float
    token_p50_s: float
    token_p99_s: float
    step_p50_s: float
    step_p99_s: float
    goodput: float
    imbalance: float
    max_over_mean: float
    cached: float
    preemptions: float


NAMES = tuple(field.name for field in fields(Measures))


def measure(run: Run, slo: Slo) -> Measures:
    """Measure the requests in the middle of a run."""
    number = len(run.outcomes)
    outcomes = run.outcomes[int(MEASURED[0] * number) : int(MEASURED[1] * number)]
    arrivals = np.array([outcome.request.arrival_s for outcome in outcomes])
    latency = np.array([outcome.end_s for outcome in outcomes], dtype=float) - arrivals
    first = np.array([outcome.first_token_s for outcome in outcomes], dtype=float) - arrivals
    per_token = latency / [outcome.request.tree.text_tokens for outcome in outcomes]
    cv, fullest = _imbalance(run, float(arrivals[0]), float(arrivals[-1]))
    prompt_tokens = sum(outcome.request.prompt_tokens for outcome in outcomes)
    return Measures(
        *_quantiles(latency),
        *_quantiles(first),
        *_quantiles(per_token),
        *_step_quantiles(run.step_weights),
        goodput=float(np.mean((first <= slo.first_token_s) & (per_token <= slo.token_s))),
        imbalance=cv,
        max_over_mean=fullest,
        cached=sum(outcome.cached_tokens for outcome in outcomes) / prompt_tokens,
        preemptions=1000.0 * run.preemptions / number,
    )


def _quantiles(values: np.ndarray) -> tuple[float, float]:
    return float(np.quantile(values, 0.5)), float(np.quantile(values, 0.99))


def _imbalance(run: Run, begin_s: float, end_s: float) -> tuple[float, float]:
    threads = np.array(
        [sample.threads for sample in run.samples if begin_s <= sample.at_s <= end_s], dtype=float
    )
    means = threads.mean(axis=1) if len(threads) else np.zeros(0)
    busy = means > 0
    if not busy.any():
        return 0.0, 1.0
    cv = threads[busy].std(axis=1) / means[busy]
    return float(cv.mean()), float((threads[busy].max(axis=1) / means[busy]).mean())


def _step_quantiles(weights: Mapping[float, int]) -> tuple[float, float]:
    """Quantiles of step times by how many tokens came in them."""
    seconds = np.array(sorted(weights))
    shares = np.cumsum([weights[each] for each in seconds])
    places = np.searchsorted(shares, np.array([0.5, 0.99]) * shares[-1])
    return float(seconds[places[0]]), float(seconds[places[1]])


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over the seeds, and half the width of their 95 % interval (0 for one seed)."""

    mean: Measures
    half_width: Measures
    num_seeds: int


def summarise(measured: Sequence[Measures]) -> Summary:
    """Put the seeds of one setting together."""
    table = np.array([[getattr(each, name) for name in NAMES] for each in measured])
    number = len(measured)
    half = np.zeros(len(NAMES))
    if number > 1:
        half = _T95.get(number - 1, 2.6) * table.std(axis=0, ddof=1) / math.sqrt(number)
    return Summary(
        Measures(*(float(value) for value in table.mean(axis=0))),
        Measures(*(float(value) for value in half)),
        number,
    )
