"""Metrics of a gateway: finished and refused requests, queues, and router decisions."""

from collections.abc import Iterable
from enum import StrEnum
from http import HTTPStatus

from cluster.config.keys import ANONYMOUS, KeyConfig
from cluster.metrics import catalogue
from deployments.gateway.body import COMPLETION_PATHS
from deployments.gateway.callers import Caller
from deployments.gateway.models import Model
from deployments.gateway.request_log import RequestRecord
from deployments.metrics.recorder import Instruments, Recorder
from deployments.routing.policies import Reason
from deployments.routing.shared_router import ROUTERS
from deployments.wire.errors import (
    REJECTION_REASONS,
    EnginesDiedError,
    NoReplicaError,
    ReplicaLostError,
)

UNKNOWN = "unknown"
"""Label for a request that named no model, or was refused before its model was read."""

_LOST = frozenset({ReplicaLostError.code, EnginesDiedError.code, NoReplicaError.code})
_COUNTS = (catalogue.RETRIES, catalogue.MIGRATIONS, catalogue.GIVEN_UP)
_HISTOGRAMS = (catalogue.TIME_TO_FIRST_TOKEN, catalogue.REQUEST_LATENCY, catalogue.QUEUE_TIME)


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


def _found_no_replica(record: RequestRecord) -> bool:
    """Whether no replica ever took the request; after a retry, one did."""
    begun = record.status == HTTPStatus.OK or record.retries > 0
    return record.error_code == NoReplicaError.code and not begun


class GatewayMetrics:
    """The metrics of one gateway process."""

    def __init__(self, instruments: Instruments) -> None:
        self.recorder = Recorder(instruments)
        self._known_models: set[str] = set()
        self._known_classes: set[str] = set()
        self._refused: dict[str, bool] = {}
        for outcome in (Outcome.CLIENT_ERROR, Outcome.SERVER_ERROR, Outcome.CANCELLED):
            self.recorder.inc(catalogue.REQUESTS, 0, model=UNKNOWN, outcome=outcome.value)

    def rejected(self, reason: str, caller: Caller | None = None) -> None:
        """Count a refused request, which reached no replica."""
        key = None if caller is None else caller.key
        key_class = ANONYMOUS if key is None else key.metrics_class
        self.recorder.inc(catalogue.REQUESTS_REJECTED, reason=reason, key_class=key_class)

    def ended(self, record: RequestRecord, caller: Caller | None = None) -> None:
        """Count a finished request."""
        found_none = _found_no_replica(record)
        if found_none:
            self.rejected(NoReplicaError.reason, caller)
        if record.path not in COMPLETION_PATHS:
            return
        recorder, model, outcome = self.recorder, record.model or UNKNOWN, outcome_of(record)
        recorder.inc(catalogue.REQUESTS, model=model, outcome=outcome.value)
        if record.queue_s is not None:
            recorder.observe(catalogue.QUEUE_TIME, record.queue_s, model=model)
        if record.stream and record.status == HTTPStatus.OK and record.first_byte_s is not None:
            recorder.observe(catalogue.TIME_TO_FIRST_TOKEN, record.first_byte_s, model=model)
        if outcome is Outcome.OK and record.total_s is not None:
            recorder.observe(catalogue.REQUEST_LATENCY, record.total_s, model=model)
        if record.retries:
            recorder.inc(catalogue.RETRIES, record.retries - record.continued, model=model)
            recorder.inc(catalogue.MIGRATIONS, record.continued, model=model)
        if record.error_code in _LOST and not found_none:
            recorder.inc(catalogue.GIVEN_UP, model=model)

    def settings_refused(self, source: str, *, refused: bool) -> None:
        """Note whether the latest settings of a source were refused, so that older ones apply."""
        self._refused[source] = refused

    def flush(self, models: Iterable[Model], keys: Iterable[KeyConfig]) -> None:
        """Emit everything, with the current state of the models' queues and routers."""
        decisions = ROUTERS.decisions()
        classes = {ANONYMOUS, *(key.metrics_class for key in keys)}
        for key_class in classes - self._known_classes:
            self._declare_rejections(key_class)
        for source, refused in self._refused.items():
            self.recorder.set(catalogue.SETTINGS_REFUSED, float(refused), source=source)
        for model in models:
            self._take(model, decisions.get(model.settings.deployment))
        self.recorder.flush()

    def _take(self, model: Model, decisions: dict[Reason, int] | None) -> None:
        recorder, name, state = self.recorder, model.settings.name, model.state
        if name not in self._known_models:
            self._declare(name)
        recorder.set(catalogue.REQUESTS_RUNNING, state.running, model=name)
        recorder.set(catalogue.REQUESTS_QUEUED, sum(state.waiting.values()), model=name)
        recorder.set(catalogue.REPLICAS_WANTED, model.settings.wanted, model=name)
        # Before there is a router, 0 would look like the loss of all replicas.
        if decisions is not None:
            running = ROUTERS.capacity(model.settings.deployment)
            recorder.set(catalogue.REPLICAS, running, model=name)
        for reason in Reason:
            recorder.set_total(
                catalogue.ROUTER_DECISIONS,
                (decisions or {}).get(reason, 0),
                model=name,
                reason=reason.value,
            )

    def _declare(self, model: str) -> None:
        """Start the counts of a model at 0: Prometheus sees no increase to a first value."""
        self._known_models.add(model)
        for outcome in Outcome:
            self.recorder.inc(catalogue.REQUESTS, 0, model=model, outcome=outcome.value)
        for metric in _COUNTS:
            self.recorder.inc(metric, 0, model=model)
        for metric in _HISTOGRAMS:
            self.recorder.declare(metric, model=model)

    def _declare_rejections(self, key_class: str) -> None:
        self._known_classes.add(key_class)
        for reason in REJECTION_REASONS:
            self.recorder.inc(catalogue.REQUESTS_REJECTED, 0, reason=reason, key_class=key_class)
