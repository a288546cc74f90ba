"""Intervals that say how sure a figure is: over repeats, or within the only run there is.

Over repeats Student's t is used: a bootstrap of three or five values is far too narrow (the tests
measure both). Within one run the requests are resampled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from apar_core.errors import EvaluationError
from cluster.loadtest.run_file import SAMPLE_S, RequestRecord


@dataclass(frozen=True, slots=True)
class RequestTime:
    """One time of a request in seconds; None where an answer has no such time."""

    title: str
    of: Callable[[RequestRecord], float | None]


def first_token_s(record: RequestRecord) -> float | None:
    """Return the time from sending to the first piece of text."""
    return record.pieces[0][0] if record.pieces else None


def token_s(record: RequestRecord) -> float | None:
    """Return the time per further token of the text."""
    return _per_further(record, record.text_tokens)


def path_token_s(record: RequestRecord) -> float | None:
    """Return the time per further step of the critical path.

    None without the server's `apar` statistics: nobody else knows how many steps there were.
    """
    return _per_further(record, int((record.apar or {}).get("decode_steps", 0)))


def paragraph_s(record: RequestRecord) -> float | None:
    """Return the time from sending to a complete first paragraph."""
    return record.paragraph_s


def end_to_end_s(record: RequestRecord) -> float | None:
    """Return the time from sending to the last part of the answer, its finish reason."""
    return record.end_s


def _per_further(record: RequestRecord, tokens: int) -> float | None:
    if not record.pieces or tokens < 2:
        return None
    return (record.end_s - record.pieces[0][0]) / (tokens - 1)


FIRST = "ttft"
"""Name of the time to first token, which every answer with text has."""

REQUEST_TIMES = {
    FIRST: RequestTime("time to first token", first_token_s),
    "tpot": RequestTime("time per token", token_s),
    "path": RequestTime("time per token on the critical path", path_token_s),
    "paragraph": RequestTime("time to first complete paragraph", paragraph_s),
    "e2e": RequestTime("end-to-end latency", end_to_end_s),
}
"""By the name under which objectives, summaries and files know it."""

ITL = "itl"
"""Name of the inter-token latency: the gap between two pieces of text, of which a request has
many."""

TITLES = {name: time.title for name, time in REQUEST_TIMES.items()} | {ITL: "inter-token latency"}


def values_of(name: str, records: Sequence[RequestRecord]) -> list[float]:
    """Return a time of all requests that ended well and have it; all gaps for `itl`."""
    whole = [record for record in records if record.error is None]
    if name == ITL:
        return [gap for record in whole for gap in record.gaps_s]
    found = (REQUEST_TIMES[name].of(record) for record in whole)
    return [value for value in found if value is not None]


_VALUE = re.compile(r"([0-9.]+)\s*(ms|s)")
_UNITS_S = {"ms": 0.001, "s": 1.0}

Objectives = Mapping[str, float]
"""The longest time allowed, in seconds, by the name of the time."""


def parse_slo(text: str) -> Objectives:
    """Return the objectives that a text names.

    Raises EvaluationError for an unknown name, a value without unit, or a name given twice.
    """
    objectives: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (side.strip() for side in part.partition("="))
        if name not in REQUEST_TIMES:
            known = ", ".join(REQUEST_TIMES)
            raise EvaluationError(f"--slo {part!r}: no time is called {name!r}; known: {known}")
        if name in objectives:
            raise EvaluationError(f"--slo {text!r}: {name} is given twice")
        objectives[name] = _seconds(part, value)
    if not objectives:
        raise EvaluationError(f"--slo {text!r} names no objective, as ttft=2s does")
    return objectives


def meets(record: RequestRecord, objectives: Objectives) -> bool:
    """Whether a request ended well and within all of its objectives.

    A time that an answer does not have (of one token there is no time per further token) is met,
    but for that to the first token, without which there was no text at all.
    """
    if record.error is not None:
        return False
    times = {name: REQUEST_TIMES[name].of(record) for name in objectives}
    return all(
        name != FIRST if value is None else value <= objectives[name]
        for name, value in times.items()
    )


def unmeasured(records: Sequence[RequestRecord], objectives: Objectives) -> list[str]:
    """Return the objectives whose time no whole answer has, though there are whole answers.

    Nothing then says whether they were met: a time on the critical path, say, is only known where
    the server tells the steps.
    """
    whole = [record for record in records if record.error is None]
    return [
        name
        for name in objectives
        if name != FIRST
        and whole
        and all(REQUEST_TIMES[name].of(record) is None for record in whole)
    ]


def _seconds(part: str, value: str) -> float:
    matched = _VALUE.fullmatch(value)
    try:
        seconds = float(matched[1]) * _UNITS_S[matched[2]] if matched else 0.0
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise EvaluationError(f"--slo {part!r}: {value!r} is no time above 0, as 2s or 50ms is")
    return seconds


LEAST_SAMPLES = 3
"""Fewer say nothing of a steady state: the run was too short, or the server took all at once."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens per second of each sample of a run; those from `first` up to `end` are kept."""

    seconds: float
    tokens_per_s: tuple[float, ...]
    first: int
    end: int

    @property
    def kept(self) -> tuple[float, ...]:
        """The samples between warm-up and cool-down; none where there are too few."""
        found = self.tokens_per_s[self.first : self.end]
        return found if len(found) >= LEAST_SAMPLES else ()


@dataclass(frozen=True, slots=True)
class Spread:
    """What the paper's figure 5a shows of a setting."""

    mean: float
    p25: float
    p75: float
    num_samples: int


def sampled(records: Sequence[RequestRecord], seconds: float = SAMPLE_S) -> Samples:
    """Return the text tokens per second that came in each sample, of answers that came whole.

    A request is pending until the first piece of its answer has come (or it has ended): it waits
    to be sent, for a place in the server, or for its prompt. Samples that begin when nothing is
    pending any more are left out, and the first third of the others.
    """
    last_s = max((record.finished_s for record in records), default=0.0)
    number = int(last_s / seconds)
    tokens = np.zeros(number)
    for record in filter(_is_whole, records):
        for time_s, amount in record.tokens_by_piece():
            place = int(time_s / seconds)
            if place < number:
                tokens[place] += amount
    end = steady_end(records, seconds, number)
    return Samples(seconds, tuple(float(each) for each in tokens / seconds), -(-end // 3), end)


def _is_whole(record: RequestRecord) -> bool:
    return record.error is None


def steady_end(records: Sequence[RequestRecord], seconds: float, number: int) -> int:
    """Return how many of the samples begin while a request is pending."""
    begun = (record.finished_s if (s := record.first_s) is None else s for record in records)
    return min(number, -int(-max(begun, default=0.0) // seconds))


def spread(samples: Samples) -> Spread | None:
    """Return mean and quartiles of the kept samples; None if there is none."""
    if not samples.kept:
        return None
    p25, p75 = np.percentile(samples.kept, (25, 75))
    return Spread(float(np.mean(samples.kept)), float(p25), float(p75), len(samples.kept))


CONFIDENCE = 0.95
LEAST_REPEATS = 3
"""For an interval over repeats: of two, Student's is twelve times as wide as they differ."""
_RESAMPLES = 1000
# So that resampling many requests does not take gigabytes.
_BATCH = 100

Statistic = Callable[..., NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval, None where nothing says how sure it is."""

    value: float
    low: float | None = None
    high: float | None = None


def percentile(share: float) -> Statistic:
    """Return the statistic that gives a percentile (0 to 100) along an axis."""

    def statistic(values: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        return np.asarray(np.percentile(values, share, axis=axis))

    return statistic


def mean(values: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    """Return the mean along an axis."""
    return np.asarray(np.mean(values, axis=axis))


def over_repeats(values: Sequence[float]) -> Estimate:
    """Return the mean of one figure over repeats, with Student's t interval of three or more."""
    centre = float(np.mean(values))
    if len(values) < LEAST_REPEATS:
        return Estimate(centre)
    half = _t_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(centre, centre - half, centre + half)


def within_run(values: Sequence[float], statistic: Statistic, *, seed: int = 0) -> Estimate:
    """Return a statistic of one run's values, with the bootstrap interval of three or more."""
    array = np.asarray(values, dtype=float)
    value = float(statistic(array))
    if len(values) < 3:
        return Estimate(value)
    return Estimate(value, *_bootstrapped((array,), statistic, seed))


def ratio_over_repeats(these: Sequence[float], those: Sequence[float]) -> Estimate:
    """Return how many times the geometric mean of the second values that of the first is.

    The interval is Welch's on the logarithms; there is none if either has fewer than three values.
    All values must be above 0.
    """
    first, second = np.log(these), np.log(those)
    difference = float(np.mean(first) - np.mean(second))
    if min(len(these), len(those)) < LEAST_REPEATS:
        return Estimate(math.exp(difference))
    squares = [float(np.var(each, ddof=1)) / len(each) for each in (first, second)]
    if sum(squares) == 0:
        return Estimate(math.exp(difference), math.exp(difference), math.exp(difference))
    sizes = (len(these), len(those))
    freedom = sum(squares) ** 2 / sum(
        square**2 / (size - 1) for square, size in zip(squares, sizes, strict=True)
    )
    half = _t_quantile(freedom) * math.sqrt(sum(squares))
    return Estimate(math.exp(difference), math.exp(difference - half), math.exp(difference + half))


def ratio_within_runs(
    these: Sequence[float], those: Sequence[float], statistic: Statistic, *, seed: int = 0
) -> Estimate:
    """Return one run's statistic over another's, with its bootstrap interval.

    The second one's must be above 0.
    """

    def ratio(
        first: NDArray[np.float64], second: NDArray[np.float64], axis: int = -1
    ) -> NDArray[np.float64]:
        return statistic(first, axis=axis) / statistic(second, axis=axis)

    arrays = (np.asarray(these, dtype=float), np.asarray(those, dtype=float))
    value = float(ratio(*arrays))
    if min(len(these), len(those)) < 3:
        return Estimate(value)
    return Estimate(value, *_bootstrapped(arrays, ratio, seed))


def _t_quantile(freedom: float) -> float:
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))


def _bootstrapped(
    samples: tuple[NDArray[np.float64], ...], statistic: Statistic, seed: int
) -> tuple[float, float]:
    found = stats.bootstrap(
        samples,
        statistic,
        n_resamples=_RESAMPLES,
        batch=_BATCH,
        vectorized=True,
        confidence_level=CONFIDENCE,
        # BCa has no answer where all resamples agree, as a percentile of many equal values does.
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
