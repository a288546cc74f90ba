"""Reports of starting replicas, which gateways pass on to clients that wait for a model.

A replica cannot be called before it runs. So it writes what it does into the key-value store of
Ray's GCS, about once a second, and gateways read it there.
"""

import asyncio
import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from apar_core.engine.start_stages import STAGES_FILE, Stage, first_failure, latest_stage, note

__all__ = ["STAGES_FILE", "Stage", "StartBoard", "StartReport", "StartReporter", "described"]

logger = logging.getLogger(__name__)

_NAMESPACE = b"apar"
_PERIOD_S = 1.0
# A replica that has died while it started no longer reports. Large enough for a process that holds
# the interpreter's lock during an import.
_MAX_AGE_S = 30.0
_READ_AGE_S = 1.0
_UNKNOWN_RETRY_S = 15.0
_MIN_RETRY_S = 5.0
_MAX_RETRY_S = 300.0


@dataclass(frozen=True, slots=True)
class StartReport:
    """A starting replica: what it does, for how long, and how long the last start took (s)."""

    replica: str
    stage: str
    stage_s: float
    total_s: float
    last_start_s: float | None = None

    @property
    def left_s(self) -> float | None:
        """Expected seconds until it runs; None if no start of this model is known."""
        return None if self.last_start_s is None else max(0.0, self.last_start_s - self.total_s)


def described(reports: Sequence[StartReport]) -> tuple[str, float]:
    """Return a sentence on the replica that is furthest, and when to try again (s)."""
    if not reports:
        return (
            "The model has no running replica, and none has begun to start yet.",
            _UNKNOWN_RETRY_S,
        )
    furthest = max(reports, key=lambda report: report.total_s)
    text = (
        f"The model is starting: for {furthest.stage_s:.0f} s it has been {furthest.stage}, "
        f"{furthest.total_s:.0f} s after the start"
    )
    left_s = furthest.left_s
    if left_s is None:
        return f"{text}.", _UNKNOWN_RETRY_S
    retry_s = min(max(left_s, _MIN_RETRY_S), _MAX_RETRY_S)
    return f"{text}; the last start took {furthest.last_start_s:.0f} s.", retry_s


class Store(Protocol):
    """A key-value store that all processes of the cluster share."""

    def put(self, key: str, value: str) -> None:
        """Set a value."""

    def values(self, prefix: str) -> list[str]:
        """Return the values of all keys that begin with a prefix."""

    def delete(self, key: str) -> None:
        """Delete a key, if it exists."""


class GcsStore:
    """The key-value store of Ray's GCS; its calls block."""

    def __init__(self) -> None:
        # Imported here, so that reading a report needs no Ray.
        from ray.experimental import internal_kv

        self._kv: Any = internal_kv

    def put(self, key: str, value: str) -> None:
        """Set a value."""
        self._kv._internal_kv_put(key.encode(), value.encode(), namespace=_NAMESPACE)

    def values(self, prefix: str) -> list[str]:
        """Return the values of all keys that begin with a prefix."""
        keys = self._kv._internal_kv_list(prefix.encode(), namespace=_NAMESPACE)
        found = [self._kv._internal_kv_get(key, namespace=_NAMESPACE) for key in keys]
        return [value.decode() for value in found if value is not None]

    def delete(self, key: str) -> None:
        """Delete a key, if it exists."""
        self._kv._internal_kv_del(key.encode(), namespace=_NAMESPACE)


def _starting(deployment: str) -> str:
    return f"starting/{deployment}/"


def _took(deployment: str) -> str:
    return f"took/{deployment}/"


class StartReporter:
    """Reports the start of this replica, in an executor of its own, until `close`.

    The stages of the engine's processes come through a file, whose name they inherit.
    """

    def __init__(
        self,
        deployment: str,
        replica: str,
        store: Store,
        *,
        clock: Callable[[], float] = time.time,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._deployment = deployment
        self._key = _starting(deployment) + replica
        self._replica = replica
        self._store = store
        self._clock = clock
        self._period_s = period_s
        self._began_s = self._stage_began_s = clock()
        self._folder = tempfile.TemporaryDirectory(prefix="apar-start-")
        self.file = Path(self._folder.name) / "stages"
        self._stage = Stage.IMPORTING
        self._ended = threading.Event()
        self._executor = threading.Thread(target=self._run, name="start-reporter", daemon=True)
        self._executor.start()

    def reached(self, stage: Stage) -> None:
        """Note that a stage has begun."""
        note(self.file, stage)

    @property
    def failure(self) -> str | None:
        """The first error of a process of the engine, None if none has reported one."""
        return first_failure(self.file)

    def close(self, *, runs: bool) -> None:
        """Stop reporting; `runs` tells whether the start has succeeded."""
        self._ended.set()
        self._executor.join(timeout=2 * self._period_s)
        self._store.delete(self._key)
        if runs:
            took = json.dumps({"seconds": self._clock() - self._began_s})
            self._store.put(_took(self._deployment), took)
        self._folder.cleanup()

    def _run(self) -> None:
        while True:
            self.report()
            if self._ended.wait(self._period_s):
                return

    def report(self) -> None:
        """Write one report."""
        now_s = self._clock()
        stage = latest_stage(self.file) or self._stage
        if stage is not self._stage:
            self._stage, self._stage_began_s = stage, now_s
        report = StartReport(
            self._replica, stage.value, now_s - self._stage_began_s, now_s - self._began_s
        )
        self._store.put(self._key, json.dumps({"at_s": now_s} | asdict(report)))


class StartBoard:
    """Reads the reports of one deployment's starting replicas, at most once a second."""

    def __init__(
        self,
        deployment: str,
        store: Callable[[], Store] = GcsStore,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._deployment = deployment
        self._store = store
        self._clock = clock
        self._read_s = float("-inf")
        self._reports: list[StartReport] = []

    async def reports(self) -> Sequence[StartReport]:
        """Return the reports; the last ones if the store does not answer."""
        if self._clock() - self._read_s >= _READ_AGE_S:
            self._read_s = self._clock()
            try:
                self._reports = await asyncio.to_thread(self._read)
            except Exception:  # a refusal must not become an error because of its details
                logger.warning("reports of starting replicas not read", exc_info=True)
        return self._reports

    def _read(self) -> list[StartReport]:
        store = self._store()
        took = [json.loads(value)["seconds"] for value in store.values(_took(self._deployment))]
        reports = []
        for value in store.values(_starting(self._deployment)):
            fields = json.loads(value)
            if self._clock() - fields.pop("at_s") <= _MAX_AGE_S:
                fields["last_start_s"] = took[0] if took else None
                reports.append(StartReport(**fields))
        return reports
