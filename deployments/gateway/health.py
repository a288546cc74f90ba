"""Health of each model, as reported by the replicas' engines, not by the controller.

`/health` covers all models, `/health/MODEL` one of them; `/ready` tells whether any request can be
served. `/live` (`DrainMiddleware`) asks no replica.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus

from deployments.gateway.models import Model
from deployments.wire.errors import JSON_TYPE, NotReadyError, response_for
from deployments.wire.response import ResponseStart
from deployments.wire.start import StartReport, described

LIVE_PATH = "/live"
HEALTH_PATH = "/health"
READY_PATH = "/ready"

# Long steps delay an engine's reply. Kubernetes' probes give up after 5 s.
_ANSWER_S = 4.0
# However many probes there are, the replicas are asked at most this often.
_AGE_S = 1.0


class Status(StrEnum):
    """State of a model. `ASLEEP`: scaled to zero, a request starts a replica."""

    OK = "ok"
    ASLEEP = "asleep"
    STARTING = "starting"
    DOWN = "down"

    @property
    def serves(self) -> bool:
        """Whether a request would be answered."""
        return self in (Status.OK, Status.ASLEEP)


@dataclass(frozen=True, slots=True)
class ModelHealth:
    """State of a model: replicas wanted, running according to Ray Serve, and answering now."""

    status: Status
    wanted: int
    running: int
    answering: int
    starting: Sequence[StartReport] = ()

    @property
    def fields(self) -> dict[str, object]:
        """The body for clients."""
        starting = [
            {
                "stage": report.stage,
                "stage_seconds": round(report.stage_s, 1),
                "seconds": round(report.total_s, 1),
                "expected_seconds_left": None if report.left_s is None else round(report.left_s, 1),
            }
            for report in self.starting
        ]
        replicas = {"wanted": self.wanted, "running": self.running, "answering": self.answering}
        return {"status": self.status.value, "replicas": replicas, "starting": starting}


class HealthProbe:
    """The health of all models, each asked at most once a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, ModelHealth]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def of(self, model: Model) -> ModelHealth:
        """Return a model's health; takes at most a few seconds."""
        name = model.settings.deployment
        async with self._locks.setdefault(name, asyncio.Lock()):
            asked_s, health = self._known.get(name, (float("-inf"), None))
            if health is None or self._clock() - asked_s >= _AGE_S:
                health = await self._asked(model)
                self._known[name] = (self._clock(), health)
        return health

    async def _asked(self, model: Model) -> ModelHealth:
        began_s = self._clock()
        answering = await model.replicas.answering(_ANSWER_S)
        if not answering and model.heard_s >= began_s - _ANSWER_S:
            # An engine in a long step does not answer, but its tokens arrive.
            answering = 1
        running = model.replicas.num_running
        starting: Sequence[StartReport] = ()
        if answering < max(model.settings.wanted, 1):
            starting = await model.replicas.starting()
        if answering:
            status = Status.OK
        elif not running and not model.settings.wanted:
            status = Status.ASLEEP
        elif starting:
            status = Status.STARTING
        else:
            status = Status.DOWN
        return ModelHealth(status, model.settings.wanted, running, answering, starting)

    async def all_of(self, models: Mapping[str, Model]) -> dict[str, ModelHealth]:
        """Return the health of several models, by the names given."""
        found = await asyncio.gather(*(self.of(model) for model in models.values()))
        return dict(zip(models, found, strict=True))


def health_response(health: Mapping[str, ModelHealth], shown: Sequence[str]) -> ResponseStart:
    """Return the response to `/health`: 200 if all models can serve; the body lists `shown`."""
    failing = [name for name, each in health.items() if not each.status.serves]
    fields: dict[str, object] = {
        "status": "ok" if not failing else "degraded" if len(failing) < len(health) else "down",
        "models": {name: health[name].fields for name in shown},
    }
    if not failing:
        return _answer(fields)
    named = ", ".join(f"`{name}`" for name in failing if name in shown)
    text = f"{len(failing)} of {len(health)} models cannot serve"
    return _answer(fields, NotReadyError(f"{text}: {named}." if named else f"{text}."))


def model_response(health: ModelHealth) -> ResponseStart:
    """Return the response to `/health/MODEL`: 200 if the model can serve."""
    if health.status.serves:
        return _answer(health.fields)
    return _answer(health.fields, not_ready(health.starting))


def ready_response(health: Mapping[str, ModelHealth]) -> ResponseStart:
    """Return the response to `/ready`: 200 if at least one model can serve."""
    if any(each.status.serves for each in health.values()):
        return _answer({"status": "ok"})
    starting = [report for each in health.values() for report in each.starting]
    return _answer({"status": "down"}, not_ready(starting))


def not_ready(reports: Sequence[StartReport]) -> NotReadyError:
    """Return the error while no replica runs, with the progress of the starting ones."""
    text, retry_after_s = described(reports)
    return NotReadyError(text, retry_after_s=retry_after_s)


def _answer(fields: dict[str, object], error: NotReadyError | None = None) -> ResponseStart:
    if error is None:
        return ResponseStart(HTTPStatus.OK, [JSON_TYPE], json.dumps(fields).encode())
    answer = response_for(error)
    headers = [item for item in answer.headers if item[0] != b"content-length"]
    body = json.loads(answer.body) | fields
    return ResponseStart(answer.status, headers, json.dumps(body).encode())
