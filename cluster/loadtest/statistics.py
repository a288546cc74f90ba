"""Times of requests, objectives on them, throughput samples, and confidence intervals.

Intervals over repeats use Student's t, because a bootstrap of three or five values is far too
narrow (the tests measure both). Within a single run, requests are resampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from apar_core.errors import EvaluationError
from apar_core.intervals import MIN_REPEATS, Estimate
from apar_core.suggestions import did_you_mean
from cluster.durations import parse_duration
from cluster.loadtest.run_file import SAMPLE_S, RequestRecord


@dataclass(frozen=True, slots=True)
class RequestTime:
    """A time of a request in seconds; None if an answer lacks it."""

    title: str
    of: Callable[[RequestRecord], float | None]


def first_token_s(record: RequestRecord) -> float | None:
    """Return the time from sending to the first text."""
    return record.pieces[0][0] if record.pieces else None


def token_s(record: RequestRecord) -> float | None:
    """Return the time per text token after the first."""
    return _per_further(record, record.text_tokens)


def path_token_s(record: RequestRecord) -> float | None:
    """Return the time per step of the critical path after the first.

    None without the server's `apar` statistics, which contain the number of steps.
    """
    return _per_further(record, int((record.apar or {}).get("decode_steps", 0)))


def paragraph_s(record: RequestRecord) -> float | None:
    """Return the time from sending to the end of the first paragraph."""
    return record.paragraph_s


def certain_token_s(record: RequestRecord) -> float | None:
    """Return the mean time from sending until a token was certain."""
    return record.reader.certain_s


def silence_s(record: RequestRecord) -> float | None:
    """Return the longest time between two chunks with text; None for fewer than two."""
    return record.reader.longest_silence_s


def end_to_end_s(record: RequestRecord) -> float | None:
    """Return the time from sending to the last chunk, with the finish reason."""
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
    "certain": RequestTime("time to certain token", certain_token_s),
    "paragraph": RequestTime("time to first complete paragraph", paragraph_s),
    "silence": RequestTime("longest silence of the stream", silence_s),
    "e2e": RequestTime("end-to-end latency", end_to_end_s),
}
"""Request times by their name in objectives, summaries and files."""

ITL = "itl"
"""Name of the inter-token latency, the gap between two chunks of text; a request has many."""

TITLES = {name: time.title for name, time in REQUEST_TIMES.items()} | {ITL: "inter-token latency"}


def values_of(name: str, records: Sequence[RequestRecord]) -> list[float]:
    """Return a time of all complete answers that have it; for `itl`, all gaps."""
    whole = [record for record in records if record.error is None]
    if name == ITL:
        return [gap for record in whole for gap in record.gaps_s]
    found = (REQUEST_TIMES[name].of(record) for record in whole)
    return [value for value in found if value is not None]


Objectives = Mapping[str, float]
"""Maximum times in seconds, by name."""


def parse_slo(
    text: str, known: Collection[str] = tuple(REQUEST_TIMES), step_s: float | None = None
) -> Objectives:
    """Parse objectives such as `ttft=2s,tpot=50ms,e2e=30s`.

    With `step_s`, the step time of a request that runs alone, `tpot=1.5x` is a multiple of it.
    Raises EvaluationError for an unknown or repeated name, or a value without unit.
    """
    objectives: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (side.strip() for side in part.partition("="))
        if name not in known:
            raise EvaluationError(
                f"--slo {part!r}: unknown time {name!r}; known: {', '.join(known)}"
                f"{did_you_mean(name, known)}"
            )
        if name in objectives:
            raise EvaluationError(f"--slo {text!r}: {name} is repeated")
        try:
            if step_s is not None and value.endswith("x"):
                objectives[name] = float(value[:-1]) * step_s
            else:
                objectives[name] = parse_duration(value)
        except ValueError as error:
            multiple = "" if step_s is None else ", nor a multiple of the step time, such as 1.5x"
            raise EvaluationError(f"--slo {part!r}: {error}{multiple}") from error
        if not 0 < objectives[name] < math.inf:
            raise EvaluationError(f"--slo {part!r}: the time must be above 0")
    if not objectives:
        raise EvaluationError(f"--slo {text!r} contains no objective; example: ttft=2s")
    return objectives


def meets(record: RequestRecord, objectives: Objectives) -> bool:
    """Whether an answer is complete and meets all objectives.

    An objective on a time that the answer lacks counts as met, for example the time per token of an
    answer with one token. The exception is the time to first token: without it there was no text.
    """
    if record.error is not None:
        return False
    times = {name: REQUEST_TIMES[name].of(record) for name in objectives}
    return all(
        name != FIRST if value is None else value <= objectives[name]
        for name, value in times.items()
    )


def unmeasured(records: Sequence[RequestRecord], objectives: Objectives) -> list[str]:
    """Return the objectives whose time is missing from every complete answer.

    Whether they were met is unknown. For example, times on the critical path need a server that
    reports steps. Without complete answers the list is empty.
    """
    whole = [record for record in records if record.error is None]
    return [
        name
        for name in objectives
        if name != FIRST
        and whole
        and all(REQUEST_TIMES[name].of(record) is None for record in whole)
    ]


MIN_SAMPLES = 3
"""Minimum for a steady state; with fewer, the run was too short."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Throughput of each sample of a run; those from `first` up to `end` are kept."""

    seconds: float
    tokens_per_s: tuple[float, ...]
    first: int
    end: int

    @property
    def kept(self) -> tuple[float, ...]:
        """Samples between warm-up and cool-down; empty if there are too few."""
        found = self.tokens_per_s[self.first : self.end]
        return found if len(found) >= MIN_SAMPLES else ()


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and quartiles, as in the paper's figure 5a."""

    mean: float
    p25: float
    p75: float
    num_samples: int


def sampled(records: Sequence[RequestRecord], seconds: float = SAMPLE_S) -> Samples:
    """Return the text tokens per second of complete answers, in samples of equal length.

    As in the paper (arXiv 2401.06761, appendix C.2), the first third of the samples and those that
    begin when no request is pending are excluded. A request is pending until its first text
    arrives or it ends.
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
    """Return the number of samples that begin while a request is pending."""
    begun = (record.finished_s if (s := record.first_s) is None else s for record in records)
    return min(number, -int(-max(begun, default=0.0) // seconds))


def spread(samples: Samples) -> Spread | None:
    """Return mean and quartiles of the kept samples; None if there are none."""
    if not samples.kept:
        return None
    p25, p75 = np.percentile(samples.kept, (25, 75))
    return Spread(float(np.mean(samples.kept)), float(p25), float(p75), len(samples.kept))


CONFIDENCE = 0.95
_RESAMPLES = 1000
# Limits the memory of resampling many requests.
_BATCH = 100

Statistic = Callable[..., NDArray[np.float64]]


def percentile(share: float) -> Statistic:
    """Return a statistic for a percentile (0 to 100) along an axis."""

    def statistic(values: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        return np.asarray(np.percentile(values, share, axis=axis))

    return statistic


def mean(values: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    """Return the mean along an axis."""
    return np.asarray(np.mean(values, axis=axis))


def over_repeats(values: Sequence[float]) -> Estimate:
    """Return the mean over repeats; with three or more, with Student's t interval."""
    centre = float(np.mean(values))
    if len(values) < MIN_REPEATS:
        return Estimate(centre)
    half = _t_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(centre, centre - half, centre + half)


def within_run(values: Sequence[float], statistic: Statistic, *, seed: int = 0) -> Estimate:
    """Return a statistic of one run; with three or more values, with its bootstrap interval."""
    array = np.asarray(values, dtype=float)
    value = float(statistic(array))
    if len(values) < 3:
        return Estimate(value)
    return Estimate(value, *_bootstrapped((array,), statistic, seed))


def ratio_over_repeats(these: Sequence[float], those: Sequence[float]) -> Estimate:
    """Return the geometric mean of the first values divided by that of the second.

    The interval is Welch's on the logarithms, None if either side has fewer than three values. All
    values must be positive.
    """
    first, second = np.log(these), np.log(those)
    difference = float(np.mean(first) - np.mean(second))
    if min(len(these), len(those)) < MIN_REPEATS:
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
    """Return the ratio of a statistic of two runs with its bootstrap interval.

    The second statistic must be positive.
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
        # BCa fails if all resamples are equal, as for a percentile of many equal values.
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
