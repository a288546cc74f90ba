"""`apar serve` in a process of its own, and what can be seen of it from outside."""

import json
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

from cluster.local_ray import free_port

WINDOW = ("-m", "tests.integration.serving.serve_and_look")
MAIN = "import typer; from cluster.cli.serve import serve; typer.run(serve)"
START_S = 180.0
STOP_S = 60.0
LOOK_S = 60.0
LOG_S = 20.0
ENGINE = "VLLM::EngineCore"
REPLICA = "ray::ServeReplica:apar:Replica"
GATEWAY = "ray::ServeReplica:apar:Gateway"
CONTROLLER = "ray::ServeController"
HAPROXY = "haproxy"
TINY: dict[str, Any] = {
    "checkpoint": "apar-tiny",
    "cpu_threads": 1,
    "kv_cache_gib": 0.1,
    "coalesce_s": 0.0,
    # So that a text does not depend on what else runs: greedy decoding in full precision.
    "engine": {"dtype": "float32", "enforce_eager": True},
}


@contextmanager
def apar_serve(
    *arguments: str, log: Path, main: tuple[str, ...] = ("-c", MAIN)
) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own, so that everything it starts can be found."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *main, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            for member in session_members(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)


def session_members(leader: int) -> set[int]:
    """Pids of the processes of a session; a zombie is gone already."""
    members = set()
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.add(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def wait_for(log: Path, text: str, process: subprocess.Popen[bytes]) -> str:
    """What has been printed, once `text` is in it."""
    deadline = time.monotonic() + START_S
    while text not in (said := log.read_text(errors="replace")):
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.2)
    return said


@dataclass
class Server:
    """A running `apar serve --config`."""

    process: subprocess.Popen[bytes]
    config_path: Path
    log: Path
    url: str

    def write(self, *models: dict[str, Any], **fields: Any) -> None:
        """Change the file; the server does not read it before a rollout."""
        port = int(self.url.rpartition(":")[2])
        values = {"port": port, "models": list(models)} | fields
        self.config_path.write_text(yaml.safe_dump(values))

    def roll_out(self) -> str:
        """Send a SIGHUP and wait for what the server says of it."""
        before = self.log.read_text(errors="replace")
        self.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + START_S
        while True:
            said = self.log.read_text(errors="replace")[len(before) :]
            if "Rolled out" in said or "No rollout" in said:
                return said
            assert time.monotonic() < deadline, said
            time.sleep(0.2)

    def processes(self, title: str) -> list[psutil.Process]:
        """The server's living processes whose command line has `title` in it, oldest first."""
        found = []
        for pid in session_members(self.process.pid):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if title in " ".join(process.cmdline()[:1]):
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def loads(self, deployment: str = "Replica-apar-tiny") -> list[dict[str, Any]]:
        """What every replica of a deployment says of its load."""
        return self.answers(deployment)

    def answers(self, asked: str) -> list[Any]:
        """What `serve_and_look` answers to a question."""
        question = self.config_path.with_suffix(".ask")
        answer = self.config_path.with_suffix(".loads")
        answer.unlink(missing_ok=True)
        question.write_text(asked)
        deadline = time.monotonic() + LOOK_S
        while not answer.exists():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        found = json.loads(answer.read_text())
        return found if isinstance(found, list) else []

    def records(self) -> list[dict[str, Any]]:
        """The log's lines of requests; there are none where the logs have a folder."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            with suppress(ValueError):  # Not all is JSON, and the last line may be half written.
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") == "request":
                    found.append(event)
        return found

    def record(self, request_id: str) -> dict[str, Any]:
        """The request's line in the log, which is written just after the end of the answer."""
        deadline = time.monotonic() + LOG_S
        while True:
            for record in self.records():
                if record["request_id"] == request_id:
                    return record
            assert time.monotonic() < deadline, f"no line of request {request_id}"
            time.sleep(0.05)

    def wait_until_idle(self, num_replicas: int, timeout_s: float = 60.0) -> None:
        """Return when so many replicas hold nothing of any request; fails when something stays."""
        deadline = time.monotonic() + timeout_s
        while True:
            loads = self.loads()
            busy = [
                load
                for load in loads
                if load["requests_inside"]
                or load["threads"]
                or load["free_blocks"] != load["kv_blocks"]
            ]
            if len(loads) == num_replicas and not busy:
                return
            assert time.monotonic() < deadline, loads
            time.sleep(0.5)

    def wait_for_replicas(self, number: int, timeout_s: float = 120.0) -> None:
        """Return when so many engines run and the server is healthy."""
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(httpx.HTTPError):
                healthy = httpx.get(f"{self.url}/health", timeout=5).status_code == 200
                if healthy and len(self.processes(ENGINE)) == number:
                    return
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)


@contextmanager
def serving(folder: Path, *models: dict[str, Any], **fields: Any) -> Iterator[Server]:
    """A server of these models, once it is ready; ended, and checked to have left nothing."""
    config, log, port = folder / "config.yaml", folder / "log", free_port()
    config.write_text(yaml.safe_dump({"port": port, "models": list(models)} | fields))
    with apar_serve("--config", str(config), log=log, main=WINDOW) as process:
        wait_for(log, "Press Ctrl-C to stop", process)
        server = Server(process, config, log, f"http://127.0.0.1:{port}")
        yield server
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=STOP_S)
        left = session_members(process.pid)
        assert left == set(), [psutil.Process(pid).cmdline() for pid in left]
