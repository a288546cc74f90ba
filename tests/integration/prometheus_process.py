"""Prometheus and Alertmanager in processes of their own, and what they tell over HTTP."""

import json
import math
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.local_ray import free_port
from tests.fakes.tools import find, needs

READY_S = 30.0
STOP_S = 20.0
PROMETHEUS = find("prometheus")
ALERTMANAGER = find("alertmanager")
needs_prometheus = needs("prometheus")
needs_alertmanager = needs("alertmanager")


class QueryError(Exception):
    """Prometheus refused a query."""


@dataclass(frozen=True)
class Series:
    """Labels of a series (`__name__` among them) and its points, (unix time in s, value)."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def value(self) -> float:
        """The newest value; an instant query gives only one."""
        return self.points[-1][1]


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def query(self, expression: str, at_s: float | None = None) -> list[Series]:
        """An instant query, now or at a unix time; a scalar counts as a series without labels."""
        time_of = {} if at_s is None else {"time": str(at_s)}
        return self._series("query", {"query": expression} | time_of)

    def query_range(
        self, expression: str, start_s: float, end_s: float, step_s: float
    ) -> list[Series]:
        """A query at every step between two unix times."""
        span = {"start": str(start_s), "end": str(end_s), "step": str(step_s)}
        return self._series("query_range", {"query": expression} | span)

    def value(self, expression: str) -> float:
        """The one value of an instant query; NaN where it gives none, fails where several."""
        found = self.query(expression)
        assert len(found) < 2, found
        return found[0].value if found else math.nan

    def wait_for(
        self,
        expression: str,
        right: Callable[[list[Series]], bool] = bool,
        timeout_s: float = 60.0,
    ) -> list[Series]:
        """The query's result once it is right; by default, once there is any."""
        deadline = time.monotonic() + timeout_s
        while not right(found := self.query(expression)):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{expression}: {found}"
            time.sleep(0.2)
        return found

    def targets(self) -> list[dict[str, Any]]:
        """What it scrapes: `scrapeUrl`, `health`, `lastError`, `labels`."""
        return list(self._get("targets", {"state": "active"})["activeTargets"])

    def alerts(self) -> list[dict[str, Any]]:
        """Alerts that are pending or fire."""
        return list(self._get("alerts", {})["alerts"])

    def rules(self) -> list[dict[str, Any]]:
        """All rules: `name`, `query`, `health`, `lastError`, and of alerts `state`."""
        return [rule for group in self._get("rules", {})["groups"] for rule in group["rules"]]

    def metric_names(self) -> set[str]:
        """Names of all series that it holds."""
        return set(self._get("label/__name__/values", {}))

    def _series(self, kind: str, parameters: dict[str, str]) -> list[Series]:
        data = self._get(kind, parameters)
        if data["resultType"] == "scalar":
            return [Series({}, (_point(data["result"]),))]
        return [
            Series(each["metric"], tuple(map(_point, each.get("values") or [each["value"]])))
            for each in data["result"]
        ]

    def _get(self, path: str, parameters: dict[str, str]) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        content = answer.json()
        if content["status"] != "success":
            raise QueryError(f"{content['errorType']}: {content['error']} ({parameters})")
        return content["data"]


def _point(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


@contextmanager
def prometheus(config: Path, folder: Path, port: int | None = None) -> Iterator[Prometheus]:
    """Prometheus with a configuration file, once it is ready; its data and log are in `folder`.

    Paths of rule files and of discovery files are relative to the configuration. Skips the test
    where Prometheus is not installed.
    """
    if PROMETHEUS is None:
        pytest.skip("prometheus is not installed")
    port = port or free_port()
    command = [
        PROMETHEUS,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'prometheus-data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    log = folder / "prometheus.log"
    with _running(command, log, f"http://127.0.0.1:{port}/-/ready") as process:
        yield Prometheus(f"http://127.0.0.1:{port}", process, log)


@contextmanager
def alertmanager(config: Path, folder: Path, port: int | None = None) -> Iterator[str]:
    """Alertmanager with a configuration file, once it is ready: its address, `host:port`.

    Skips the test where Alertmanager is not installed.
    """
    if ALERTMANAGER is None:
        pytest.skip("alertmanager is not installed")
    port = port or free_port()
    command = [
        ALERTMANAGER,
        f"--config.file={config}",
        f"--storage.path={folder / 'alertmanager-data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
        "--log.level=warn",
    ]
    with _running(command, folder / "alertmanager.log", f"http://127.0.0.1:{port}/-/ready"):
        yield f"127.0.0.1:{port}"


@contextmanager
def _running(command: list[str], log: Path, ready: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process from when its page answers; ended on leaving."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + READY_S
        while not _answers(ready):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


@dataclass
class Webhook:
    """An HTTP server that keeps what Alertmanager posts to it."""

    url: str
    notifications: list[dict[str, Any]] = field(default_factory=list)

    def alerts(self, name: str, status: str = "firing") -> list[dict[str, Any]]:
        """All alerts of a name that have come with a status."""
        return [
            alert
            for notification in self.notifications
            for alert in notification["alerts"]
            if alert["labels"]["alertname"] == name and alert["status"] == status
        ]

    def wait_for(
        self, name: str, status: str = "firing", timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """The first alert of a name that comes with a status."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.alerts(name, status)):
            assert time.monotonic() < deadline, self.notifications
            time.sleep(0.1)
        return found[0]


@contextmanager
def webhook() -> Iterator[Webhook]:
    """A receiver for Alertmanager's `webhook_configs` on a free port."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(json.loads(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Webhook(f"http://127.0.0.1:{server.server_address[1]}/", received)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
