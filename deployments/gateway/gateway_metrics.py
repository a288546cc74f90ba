"""Metrics of a gateway: finished and refused requests, queues, and router decisions."""

import asyncio
from collections.abc import Iterable, Sequence
from enum import StrEnum
from http import HTTPStatus

from apar_core.metrics.recorder import Recorder
from deployments.config.keys import ANONYMOUS
from deployments.gateway.callers import Caller
from deployments.gateway.models import Model
from deployments.gateway.request_log import RequestRecord
from deployments.metrics import catalogue
from deployments.routing.policies import Reason
from deployments.routing.shared_router import ROUTERS
from deployments.wire.errors import (
    REJECTION_REASONS,
    EnginesDiedError,
    NoReplicaError,
    ReplicaLostError,
)
from deployments.wire.routes import generates

UNKNOWN = "unknown"
"""Label for a request that named no model, or was refused before its model was read."""

_LOST = frozenset({ReplicaLostError.code, EnginesDiedError.code, NoReplicaError.code})
_COUNTS = (catalogue.RETRIES, catalogue.MIGRATIONS, catalogue.GIVEN_UP)
_HISTOGRAMS = (
    catalogue.TIME_TO_FIRST_TOKEN,
    catalogue.REQUEST_LATENCY,
    catalogue.QUEUE_TIME,
)
_READER_HISTOGRAMS = (catalogue.TIME_TO_CERTAIN_TOKEN, catalogue.LONGEST_SILENCE)
_FORKED = {None: UNKNOWN, False: "no", True: "yes"}
_STATE_GAUGES = (
    catalogue.REQUESTS_RUNNING,
    catalogue.REQUESTS_QUEUED,
    catalogue.BATCH_LINES_QUEUED,
    catalogue.REPLICAS,
    catalogue.REPLICAS_WANTED,
    catalogue.UNREACHABLE_REPLICAS,
)
_TOKEN_KINDS = ("prompt", "generated")
_LINE_OUTCOMES = ("completed", "failed")
_OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
_ENDED_STATUSES = ("completed", "failed", "expired", "cancelled")
LINE_IS_RETRIED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses with which the line of a batch is sent again later."""


class Outcome(StrEnum):
    """Result of a request, as its client sees it."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    SERVER_ERROR = "server_error"
    CANCELLED = "cancelled"


def outcome_of(record: RequestRecord) -> Outcome:
    """Return the outcome of a finished request."""
    status = record.status
    if record.cancelled or status is None:
        return Outcome.CANCELLED
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return Outcome.SERVER_ERROR
    if status >= HTTPStatus.BAD_REQUEST:
        return Outcome.CLIENT_ERROR
    # An error inside a stream follows the status 200.
    return Outcome.OK if record.error_code is None else Outcome.SERVER_ERROR


def _class_of(caller: Caller | None) -> str:
    key = None if caller is None else caller.key
    return ANONYMOUS if key is None else key.metrics_class


class GatewayMetrics:
    """The metrics of one gateway process."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._models: set[str] = set()
        self._key_classes: set[str] = set()
        self._declared: set[tuple[str, str]] = set()
        self.recorder.declare(catalogue.EVENT_LOOP_LAG)
        self.recorder.declare(catalogue.LOG_LINES_DROPPED)

    def rejected(self, reason: str, caller: Caller | None = None) -> None:
        """Count a refused request, which reached no replica."""
        self.recorder.inc(catalogue.REQUESTS_REJECTED, reason=reason, key_class=_class_of(caller))

    def ended(self, record: RequestRecord, caller: Caller | None = None) -> None:
        """Count a finished request."""
        found_none = record.found_no_replica
        if found_none and record.batch_id is None:
            self.rejected(NoReplicaError.reason, caller)
        if not generates(record.path):
            return
        is_line = record.batch_id is not None
        if is_line and record.status in LINE_IS_RETRIED:
            return
        recorder, model, outcome = self.recorder, record.model or UNKNOWN, outcome_of(record)
        key_class = _class_of(caller)
        recorder.inc(catalogue.REQUESTS, model=model, key_class=key_class, outcome=outcome.value)
        for kind, number in zip(
            _TOKEN_KINDS, (record.prompt_tokens, record.generated_tokens), strict=True
        ):
            if number:
                labels = {"model": model, "key_class": key_class, "kind": kind}
                recorder.inc(catalogue.CHARGED_TOKENS, number, **labels)
        if record.queue_s is not None and not is_line:
            recorder.observe(catalogue.QUEUE_TIME, record.queue_s, model=model)
        if record.stream and record.status == HTTPStatus.OK and record.first_byte_s is not None:
            recorder.observe(catalogue.TIME_TO_FIRST_TOKEN, record.first_byte_s, model=model)
        forked = _FORKED[None if record.forks is None else record.forks > 0]
        for metric, value in zip(
            _READER_HISTOGRAMS, (record.certain_s, record.longest_silence_s), strict=True
        ):
            if value is not None:
                recorder.observe(metric, value, model=model, forked=forked)
        if outcome is Outcome.OK and record.total_s is not None and not is_line:
            recorder.observe(catalogue.REQUEST_LATENCY, record.total_s, model=model)
        if record.retries:
            recorder.inc(catalogue.RETRIES, record.retries - record.continued, model=model)
            recorder.inc(catalogue.MIGRATIONS, record.continued, model=model)
        if record.error_code in _LOST and not found_none:
            recorder.inc(catalogue.GIVEN_UP, model=model)

    def batch_line(self, caller: Caller | None, *, has_failed: bool) -> None:
        """Count a line of a batch whose result is stored."""
        outcome = "failed" if has_failed else "completed"
        self.recorder.inc(catalogue.BATCH_LINES, key_class=_class_of(caller), outcome=outcome)

    def batch_ended(self, status: str) -> None:
        """Count a batch that has ended."""
        self.recorder.inc(catalogue.BATCHES_ENDED, outcome=status)

    def batches_open(self, statuses: Sequence[str]) -> None:
        """Note the states of all batches that have not ended."""
        for status in _OPEN_STATUSES:
            self.recorder.set(catalogue.BATCHES_OPEN, statuses.count(status), state=status)

    def settings_refused(self, source: str, *, refused: bool) -> None:
        """Note whether the latest settings of a source were refused, so that older ones apply."""
        self.recorder.set(catalogue.SETTINGS_REFUSED, float(refused), source=source)

    def take(self, models: Iterable[Model], key_classes: set[str]) -> None:
        """Record the current state of the models' queues and routers."""
        models, decisions = list(models), ROUTERS.decisions()
        names = {model.settings.name for model in models}
        self._declare(names, {ANONYMOUS, *key_classes})
        for model in models:
            self._take(model, decisions.get(model.settings.deployment, {}))
        for removed in self._models - names:
            for metric in _STATE_GAUGES:
                self.recorder.set(metric, None, model=removed)

    def _take(self, model: Model, decisions: dict[Reason, int]) -> None:
        recorder, name, state = self.recorder, model.settings.name, model.state
        values = (
            state.running,
            sum(state.waiting.values()) - state.num_lines,
            state.num_lines,
            # Ray Serve creates its router, and ours with it, on first use.
            model.replicas.num_running and ROUTERS.capacity(model.settings.deployment),
            model.settings.wanted,
            model.replicas.num_unreachable,
        )
        for metric, value in zip(_STATE_GAUGES, values, strict=True):
            recorder.set(metric, value, model=name)
        for reason in Reason:
            number = decisions.get(reason, 0)
            recorder.set_total(catalogue.ROUTER_DECISIONS, number, model=name, reason=reason.value)

    def _declare(self, models: set[str], key_classes: set[str]) -> None:
        """Start the counts of new models and key classes at 0."""
        recorder = self.recorder
        for status in _ENDED_STATUSES:
            recorder.declare(catalogue.BATCHES_ENDED, outcome=status)
        for model in models - self._models:
            for metric in (*_COUNTS, *_HISTOGRAMS):
                recorder.declare(metric, model=model)
            for metric in _READER_HISTOGRAMS:
                for forked in _FORKED.values():
                    recorder.declare(metric, model=model, forked=forked)
        for key_class in key_classes - self._key_classes:
            for reason in REJECTION_REASONS:
                recorder.declare(catalogue.REQUESTS_REJECTED, reason=reason, key_class=key_class)
            for result in _LINE_OUTCOMES:
                recorder.declare(catalogue.BATCH_LINES, key_class=key_class, outcome=result)
        self._models |= models
        self._key_classes |= key_classes
        for model, key_class in {
            (model, key_class)
            for model in (*models, UNKNOWN)
            for key_class in key_classes
            if (model, key_class) not in self._declared
        }:
            self._declared.add((model, key_class))
            of = {"model": model, "key_class": key_class}
            for outcome in Outcome:
                # A request without a model cannot succeed.
                if model != UNKNOWN or outcome is not Outcome.OK:
                    recorder.declare(catalogue.REQUESTS, **of, outcome=outcome.value)
            for kind in _TOKEN_KINDS if model != UNKNOWN else ():
                recorder.declare(catalogue.CHARGED_TOKENS, **of, kind=kind)


async def watch_lag(metrics: GatewayMetrics, period_s: float = 0.5) -> None:
    """Measure the delay of a timer in this event loop, forever."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + period_s
        await asyncio.sleep(period_s)
        metrics.recorder.observe(catalogue.EVENT_LOOP_LAG, max(loop.time() - due_s, 0.0))
