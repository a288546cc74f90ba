"""Figures of a running cluster, from its current metrics and their recent increases."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from apar_core.errors import AparError
from cluster.monitor.rates import History, Rates, Reports, Window
from cluster.monitor.series import (
    GroupKey,
    Snapshot,
    Values,
    buckets,
    histogram_quantile,
    largest,
    summed,
    total,
)
from cluster.monitor.sources import PageError, Source
from deployments.metrics import catalogue
from deployments.metrics.catalogue import Metric

TREND_POINTS = 240
"""Number of readings in the sparkline of tokens per second."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 99th percentile in seconds; None without observations."""

    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """Figures of one replica; rates are per second, None until known.

    `age_s` is the time since it was first seen; `older` if it was running before the first reading.
    """

    model: str
    replica: str
    requests: float
    running: float
    waiting: float
    deferred: float
    kv_share: float | None
    tokens_per_s: float | None
    forks_per_s: float | None
    age_s: float
    older: bool


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Figures of one model over all replicas; shares are 0 to 1, None without events."""

    model: str
    replicas: float
    running: float
    queued: float
    tokens_per_s: float | None
    requests_per_s: float | None
    error_share: float | None
    forks_per_s: Mapping[str, float] | None
    attention_saved: float | None
    cache_saved: float | None
    first_token_s: Quantiles
    token_s: Quantiles
    latency_s: Quantiles
    queue_s: Quantiles


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that the monitor shows; rates are over at most `rate_s`, the rest over `window_s`.

    `rejected` counts requests in the window by reason. `trend` is tokens per second, newest last.
    """

    rate_s: float
    window_s: float
    models: tuple[ModelFigures, ...]
    replicas: tuple[ReplicaFigures, ...]
    rejected: Mapping[str, float]
    trend: tuple[float, ...]
    failures: Mapping[str, str]


@dataclass(slots=True)
class ClusterHistory:
    """State between readings.

    Rates are over `rate_s`, or longer if two reports are further apart. A process without a report
    for `quiet_s` is idle.
    """

    rate_s: float
    window_s: float
    quiet_s: float
    history: History = field(init=False)
    reports: Reports = field(init=False)
    _trend: deque[float] = field(init=False)
    _seen: dict[GroupKey, tuple[float, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.history = History(self.window_s)
        self.reports = Reports(self.rate_s, self.quiet_s)
        self._trend = deque(maxlen=TREND_POINTS)

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot."""
        older = self.history.latest is None
        interval = self.history.add(snapshot)
        self.reports.add(snapshot.at_s, {} if interval is None else interval.gained)
        rates = self.reports.rates()
        if rates.known:
            self._trend.append(total(rates.per_s, catalogue.GENERATED_TOKENS))
        alive = summed(snapshot.values, catalogue.THREADS, "model", "replica")
        self._seen = {each: self._seen.get(each, (snapshot.at_s, older)) for each in alive}

    def overview(self) -> Overview:
        """Return the figures as of the last snapshot, which must exist."""
        latest = self.history.latest
        assert latest is not None
        rates, window = self.reports.rates(), self.history.window(self.window_s)
        rejected = summed(window.gained, catalogue.REQUESTS_REJECTED, "reason")
        return Overview(
            rate_s=rates.seconds,
            window_s=window.seconds,
            models=_models(latest.values, rates, window),
            replicas=self._replicas(latest, rates),
            rejected={reason: count for (reason,), count in sorted(rejected.items()) if count},
            trend=tuple(self._trend),
            failures=dict(latest.failures),
        )

    def _replicas(self, latest: Snapshot, rates: Rates) -> tuple[ReplicaFigures, ...]:
        by = ("model", "replica")
        values = latest.values
        threads = summed(values, catalogue.THREADS, *by, "state")
        requests = summed(values, catalogue.REPLICA_REQUESTS, *by)
        kv_share = largest(values, catalogue.KV_CACHE_USAGE, *by)
        tokens = summed(rates.per_s, catalogue.GENERATED_TOKENS, *by)
        forks = summed(rates.per_s, catalogue.FORKS, *by, "outcome")
        return tuple(
            ReplicaFigures(
                model=each[0],
                replica=each[1],
                requests=requests.get(each, 0.0),
                running=threads.get((*each, "running"), 0.0),
                waiting=threads.get((*each, "waiting"), 0.0),
                deferred=threads.get((*each, "deferred"), 0.0),
                kv_share=kv_share.get(each),
                tokens_per_s=rates.of(tokens.get(each, 0.0)),
                # Delayed forks were started too, later.
                forks_per_s=rates.of(
                    sum(forks.get((*each, outcome), 0.0) for outcome in ("accepted", "delayed"))
                ),
                age_s=latest.at_s - since_s,
                older=older,
            )
            for each, (since_s, older) in sorted(self._seen.items())
        )


def _models(values: Values, rates: Rates, window: Window) -> tuple[ModelFigures, ...]:
    names = {name for metric in _OF_MODELS for (name,) in summed(values, metric, "model")}
    return tuple(_model(name, values, rates, window) for name in sorted(names - {""}))


# A model without replicas may have a queue, and vice versa.
_OF_MODELS = (catalogue.THREADS, catalogue.REQUESTS_RUNNING, catalogue.REPLICAS)


def _model(name: str, values: Values, rates: Rates, window: Window) -> ModelFigures:
    def now(metric: Metric) -> float:
        return summed(values, metric, "model").get((name,), 0.0)

    def gained(metric: Metric) -> float:
        return summed(window.gained, metric, "model").get((name,), 0.0)

    def per_s(metric: Metric) -> float | None:
        return rates.of(summed(rates.per_s, metric, "model").get((name,), 0.0))

    def quantiles(metric: Metric) -> Quantiles:
        counts = buckets(window.gained, metric, "model").get((name,), {})
        return Quantiles(histogram_quantile(0.5, counts), histogram_quantile(0.99, counts))

    forks = summed(rates.per_s, catalogue.FORKS, "model", "outcome")
    num_ended = gained(catalogue.REQUESTS)
    errors = summed(window.gained, catalogue.REQUESTS, "model", "outcome")
    return ModelFigures(
        model=name,
        replicas=_replicas_of(name, values),
        running=now(catalogue.REQUESTS_RUNNING),
        queued=now(catalogue.REQUESTS_QUEUED),
        tokens_per_s=per_s(catalogue.GENERATED_TOKENS),
        requests_per_s=per_s(catalogue.REQUESTS),
        error_share=errors.get((name, "server_error"), 0.0) / num_ended if num_ended else None,
        forks_per_s=None
        if not rates.known
        else {
            outcome: forks.get((name, outcome), 0.0)
            for outcome in ("accepted", "delayed", "refused")
        },
        attention_saved=_saved(
            gained(catalogue.ATTENDED_TOKENS), gained(catalogue.SEQUENTIAL_ATTENDED_TOKENS)
        ),
        cache_saved=_saved(
            gained(catalogue.CACHED_TOKENS), gained(catalogue.SEQUENTIAL_CACHED_TOKENS)
        ),
        first_token_s=quantiles(catalogue.TIME_TO_FIRST_TOKEN),
        token_s=quantiles(catalogue.TIME_PER_OUTPUT_TOKEN),
        latency_s=quantiles(catalogue.REQUEST_LATENCY),
        queue_s=quantiles(catalogue.QUEUE_TIME),
    )


def _replicas_of(name: str, values: Values) -> float:
    """Replicas known to the gateway or, before its first request, replicas that report metrics."""
    reporting = summed(values, catalogue.THREADS, "model", "replica")
    known = largest(values, catalogue.REPLICAS, "model").get((name,), 0.0)
    return max(known, float(sum(model == name for model, _ in reporting)))


def _saved(with_forks: float, sequential: float) -> float | None:
    return 1 - with_forks / sequential if sequential > 0 else None


_HINT = (
    "`apar serve` prints the address of its metrics at startup, unless its configuration has "
    "`metrics: {enabled: false}`."
)


class MonitorError(AparError):
    """There is nothing to show; the message suggests the reason."""


@dataclass(slots=True)
class Watch:
    """History of a source, and the start of its current outage."""

    source: Source
    history: ClusterHistory
    silent_since: float | None = None
    reason: str = ""
    _answered: float = field(default_factory=time.time)

    def read(self) -> None:
        """Take a reading. After the first one, failures are recorded as an outage.

        Raises MonitorError if the first reading fails.
        """
        first = self.history.history.latest is None
        try:
            snapshot = self.source.read()
            if not snapshot.values and first:
                raise PageError(
                    f"{', '.join(sorted(snapshot.pages)) or 'Prometheus'}: no metrics of this "
                    "cluster. Its metrics are disabled, no replica has started yet, or the page "
                    "belongs to another program"
                )
        except PageError as error:
            if first:
                raise MonitorError(f"{error}. {_HINT}") from error
            self.silent_since = self.silent_since or self._answered
            self.reason = str(error)
            return
        self.history.add(snapshot)
        self.silent_since, self._answered = None, time.time()

    def overview(self) -> Overview:
        """Return the figures of the last successful reading."""
        return self.history.overview()

    @property
    def silence(self) -> str | None:
        """Description of the current outage; None if there is none."""
        if self.silent_since is None:
            return None
        clock = time.strftime("%H:%M:%S", time.localtime(self.silent_since))
        gone_s = time.time() - self.silent_since
        return f"no answer since {clock} ({gone_s:.0f} s): {self.reason}"
