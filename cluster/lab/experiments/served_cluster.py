"""`apar serve` in separate processes for a measurement, and their CPU time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from apar_core.errors import EngineError
from cluster.local_ray import free_port

APAR = ("-c", "from cluster.cli.main import app; app()")
"""Python arguments that run the `apar` command of this installation."""
_START_S = 300.0
_STOP_S = 120.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class ServedCluster:
    """A server that is ready: its URL, and the process from which all its others descend."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes so far, without those that have exited."""
        total_s = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s


@contextmanager
def served_cluster(model: dict[str, Any], folder: Path, name: str) -> Iterator[ServedCluster]:
    """Serve one model (a `models` entry of the configuration) until the end of the context.

    Configuration and log stay in the folder. Raises EngineError if the server does not get ready.
    """
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / f"{name}.yaml", folder / f"{name}.log"
    config.write_text(yaml.safe_dump({"port": port, "models": [model]}), encoding="utf-8")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *APAR, "serve", "--config", str(config)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, process, log)
        yield ServedCluster(url, psutil.Process(process.pid))
    finally:
        _stop(process)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            # /v1/models answers before a replica runs, without the model's folder and context.
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(_POLL_S)
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise EngineError(f"apar serve did not get ready within {_START_S:g} s; {log} ends: {last}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server gracefully; kill its whole session if it does not exit."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        # The server leads its own session, so no other process is in the group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
