"""Figures of a run with confidence intervals and ratios: throughput, times, forking, servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apar_core.intervals import MIN_REPEATS, Estimate
from cluster.loadtest.run_file import ClusterFigures, RepeatFacts, RequestRecord, Run
from cluster.loadtest.statistics import (
    ITL,
    TITLES,
    Objectives,
    Statistic,
    mean,
    meets,
    over_repeats,
    percentile,
    ratio_over_repeats,
    ratio_within_runs,
    sampled,
    spread,
    unmeasured,
    values_of,
    within_run,
)


@dataclass(frozen=True, slots=True)
class Repeat:
    """One repeat of a run."""

    facts: RepeatFacts
    records: Sequence[RequestRecord]
    sample_s: float
    slo: Objectives

    @property
    def whole(self) -> list[RequestRecord]:
        """Requests with a complete answer."""
        return [record for record in self.records if record.error is None]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a repeat, computed by `of`; None if the repeat lacks it.

    `values` returns the values that `statistic` summarizes, if they are independent enough for
    resampling. `scale` converts to `unit`.
    """

    name: str
    title: str
    unit: str
    of: Callable[[Repeat], float | None]
    scale: float = 1.0
    values: Callable[[Repeat], Sequence[float]] | None = None
    statistic: Statistic = mean

    def each(self, run: Run) -> list[float]:
        """Return the figure of each repeat that has it."""
        found = (self.of(repeat) for repeat in repeats_of(run))
        return [value * self.scale for value in found if value is not None]

    def estimate(self, run: Run) -> Estimate | None:
        """Return the mean over repeats with its interval; None without any.

        With fewer than three repeats, resample the pooled requests. Without `values` there is then
        no interval.
        """
        each = self.each(run)
        if not each:
            return None
        if len(each) >= MIN_REPEATS or self.values is None:
            return over_repeats(each)
        return within_run(self._pooled(run), self.statistic)

    def ratio(self, run: Run, base: Run) -> Estimate | None:
        """Return the ratio to another run's figure; None if either is missing."""
        these, those = self.each(run), self.each(base)
        if not these or not those or min(*these, *those) <= 0:
            return None
        if min(len(these), len(those)) < MIN_REPEATS and self.values is not None:
            return ratio_within_runs(self._pooled(run), self._pooled(base), self.statistic)
        return ratio_over_repeats(these, those)

    def _pooled(self, run: Run) -> list[float]:
        assert self.values is not None
        return [value * self.scale for each in repeats_of(run) for value in self.values(each)]


def repeats_of(run: Run) -> list[Repeat]:
    """Return the repeats that sent requests."""
    settings = run.facts.settings
    found = [
        Repeat(facts, run.of_repeat(facts.repeat), settings.sample_s, settings.slo)
        for facts in run.facts.repeats
    ]
    return [repeat for repeat in found if repeat.records]


PERCENTILES = (50, 90, 99)


def tokens_per_s(repeat: Repeat) -> float:
    """Return the text tokens of complete answers per second of the repeat."""
    return sum(record.text_tokens for record in repeat.whole) / repeat.facts.duration_s


def requests_per_s(repeat: Repeat) -> float:
    """Return the complete answers per second of the repeat."""
    return len(repeat.whole) / repeat.facts.duration_s


def goodput(repeat: Repeat) -> float | None:
    """Return the requests per second that met all objectives.

    None without objectives, or if every answer lacks the time of one of them.
    """
    share = good_share(repeat)
    return None if share is None else share * len(repeat.records) / repeat.facts.duration_s


def good_share(repeat: Repeat) -> float | None:
    """Return the share of requests that met all objectives; None as for `goodput`."""
    if not repeat.slo or unmeasured(repeat.records, repeat.slo):
        return None
    return float(np.mean([meets(record, repeat.slo) for record in repeat.records]))


def _kept_mean(repeat: Repeat) -> float | None:
    found = spread(sampled(repeat.records, repeat.sample_s))
    return None if found is None else found.mean


def _apar_fields(repeat: Repeat, *names: str) -> list[dict[str, Any]]:
    """Return the `apar` objects of complete answers that have these fields."""
    found = [record.apar for record in repeat.whole if record.apar is not None]
    return [fields for fields in found if all(name in fields for name in names)]


def _apar_mean(name: str) -> Callable[[Repeat], float | None]:
    def of(repeat: Repeat) -> float | None:
        return _mean([fields[name] for fields in _apar_fields(repeat, name)])

    return of


def _apar_saved(name: str) -> Callable[[Repeat], float | None]:
    """Share saved relative to one thread with the same text."""

    def of(repeat: Repeat) -> float | None:
        own = _OWN_NAME.get(name, name)
        fields = _apar_fields(repeat, own, f"sequential_{name}")
        sequential = sum(each[f"sequential_{name}"] for each in fields)
        return _saved(sum(each[own] for each in fields), sequential)

    return of


_OWN_NAME = {"steps": "decode_steps"}

THROUGHPUT = (
    Figure(
        "tokens_per_s_kept",
        "text tokens, between warm-up and cool-down",
        "tokens/s",
        _kept_mean,
    ),
    Figure("tokens_per_s", "text tokens, whole run", "tokens/s", tokens_per_s),
    Figure("requests_per_s", "requests", "requests/s", requests_per_s),
    Figure("goodput", "goodput: requests that met all objectives", "requests/s", goodput),
    Figure("good_share", "share of requests that met all objectives", "%", good_share, 100.0),
)  # fmt: skip

FORKING = (
    Figure("threads", "threads per request", "", _apar_mean("threads")),
    Figure("text_tokens", "text tokens per request", "tokens", _apar_mean("text_tokens")),
    Figure("decode_steps", "steps of the critical path", "steps", _apar_mean("decode_steps")),
    Figure("steps_saved", "steps saved", "%", _apar_saved("steps"), 100.0),
    Figure("attention_saved", "attended tokens saved", "%", _apar_saved("attended_tokens"), 100.0),
    Figure("cache_saved", "peak cached tokens saved", "%", _apar_saved("max_cached_tokens"),
           100.0),
)  # fmt: skip


def time_figure(name: str, share: int | None) -> Figure:
    """Return a percentile of a time, or its mean, in milliseconds.

    Gaps within an answer are correlated, so they are not resampled.
    """
    statistic = mean if share is None else percentile(share)

    def of(repeat: Repeat) -> float | None:
        values = values_of(name, repeat.records)
        return float(statistic(np.asarray(values))) if values else None

    label = "mean" if share is None else f"p{share}"
    return Figure(
        f"{name}.{label}",
        f"{TITLES[name]}, {label}",
        "ms",
        of,
        1000.0,
        values=None if name == ITL else lambda repeat: values_of(name, repeat.records),
        statistic=statistic,
    )


TIMES = tuple(time_figure(name, share) for name in TITLES for share in (None, *PERCENTILES))


def _counted(of: Callable[[ClusterFigures], float | None]) -> Callable[[Repeat], float | None]:
    def of_repeat(repeat: Repeat) -> float | None:
        return None if repeat.facts.cluster is None else of(repeat.facts.cluster)

    return of_repeat


def _generated_per_s(repeat: Repeat) -> float | None:
    counted = repeat.facts.cluster
    return None if counted is None else counted.generated_tokens / repeat.facts.duration_s


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _saved(used: float, sequential: float) -> float | None:
    return 1 - used / sequential if sequential else None


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


CLUSTER = (
    Figure("generated_per_s", "tokens generated by all threads", "tokens/s", _generated_per_s),
    Figure("tokens_per_step", "tokens per engine step", "tokens",
           _counted(lambda c: _share(c.generated_tokens, c.engine_steps))),
    Figure("kv_mean", "KV cache in use, mean", "%",
           _counted(lambda c: _mean([each.kv_share for each in c.moments])), 100.0),
    Figure("kv_most", "KV cache in use, maximum", "%",
           _counted(lambda c: max((each.kv_share for each in c.moments), default=None)), 100.0),
    Figure("threads_running", "threads running, mean", "threads",
           _counted(lambda c: _mean([each.running for each in c.moments]))),
    Figure("threads_most", "threads running, maximum", "threads",
           _counted(lambda c: max((each.running for each in c.moments), default=None))),
    Figure("threads_waiting", "threads waiting, mean", "threads",
           _counted(lambda c: _mean([each.waiting + each.deferred for each in c.moments]))),
    Figure("forks", "forks", "forks", _counted(lambda c: sum(c.forks.values()))),
    Figure("forks_delayed", "delayed forks", "forks",
           _counted(lambda c: c.forks.get("delayed", 0.0))),
    Figure("cluster_attention_saved", "attended tokens saved, from the servers' metrics", "%",
           _counted(lambda c: _saved(c.attended_tokens, c.sequential_attended_tokens)), 100.0),
    Figure("cluster_cache_saved", "cached tokens saved, from the servers' metrics", "%",
           _counted(lambda c: _saved(c.cached_tokens, c.sequential_cached_tokens)), 100.0),
)  # fmt: skip

ALL_FIGURES = (*THROUGHPUT, *TIMES, *FORKING, *CLUSTER)
