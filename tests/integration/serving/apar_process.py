"""Start `apar serve` in a process of its own and observe it from outside."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import yaml

from cluster.local_ray import free_port

WINDOW = ("-m", "tests.integration.serving.serve_and_look")
MAIN = "import typer; from cluster.cli.serve import serve; typer.run(serve)"
START_S = 400.0
STOP_S = 120.0
LOOK_S = 60.0
LOG_S = 60.0
REQUEST_S = 120.0
WORKING_S, RESTING_S = 0.003, 0.057
ENGINE = "VLLM::EngineCore"
REPLICA = "ray::ServeReplica:apar:Replica"
GATEWAY = "ray::ServeReplica:apar:Gateway"
CONTROLLER = "ray::ServeController"
HAPROXY = "haproxy"
TOKEN = "plain"
"""API key that the tests' clients send; a server without keys ignores it."""
TINY: dict[str, Any] = {
    "checkpoint": "apar-tiny",
    "cpu_threads": 1,
    "kv_cache_gib": 0.1,
    # Greedy decoding in full precision does not depend on the other requests of a batch.
    "engine": {"dtype": "float32", "enforce_eager": True},
}


def authorization(token: str = TOKEN) -> dict[str, str]:
    """Return the header that carries an API key."""
    return {"authorization": f"Bearer {token}"}


@contextmanager
def apar_serve(
    *arguments: str, log: Path, main: tuple[str, ...] = ("-c", MAIN)
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command in a session of its own, so that all its processes can be found."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *main, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Usage of keys goes there by default.
            env=os.environ | {"XDG_STATE_HOME": str(log.parent / "state")},
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
    """Return the pids of a session's processes, without zombies."""
    members = set()
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.add(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def ray_folders(members: set[int]) -> set[Path]:
    """Return the private folders of servers, named in the command lines of Ray's processes."""
    lines = " ".join(" ".join(psutil.Process(pid).cmdline()) for pid in members)
    return {Path(name) for name in re.findall(r"/tmp/apar-\w+", lines)}


def keep_ray_logs(leader: int) -> None:
    """Copy the logs of a server's Ray to `out/ray-logs`, for whoever asks why a test failed."""
    with suppress(OSError, shutil.Error, psutil.Error):
        for folder in ray_folders(session_members(leader)):
            logs = folder / "ray" / "session_latest" / "logs"
            shutil.copytree(logs, Path("out") / "ray-logs" / folder.name, dirs_exist_ok=True)


def wait_for(log: Path, text: str, process: subprocess.Popen[bytes]) -> str:
    """Wait until the log contains `text`, and return the whole log."""
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
    # Folder of the request log; None if requests are logged to `log`.
    log_folder: Path | None = None

    def request(
        self, method: str, path: str, *, token: str = TOKEN, **fields: Any
    ) -> httpx.Response:
        """Send a request with an API key; `fields` are httpx's."""
        fields = {"timeout": REQUEST_S} | fields
        fields["headers"] = authorization(token) | fields.get("headers", {})
        return httpx.request(method, self.url + path, **fields)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """Send a POST request with an API key."""
        return self.request("POST", path, **fields)

    def async_client(self, *, timeout_s: float = REQUEST_S) -> httpx.AsyncClient:
        """Return a client with an API key and any number of connections."""
        return httpx.AsyncClient(
            base_url=self.url,
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None),
            headers=authorization(),
        )

    def openai(self, token: str = TOKEN) -> openai.OpenAI:
        """Return OpenAI's client, without retries."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0)

    def write(self, *models: dict[str, Any], **fields: Any) -> None:
        """Write the configuration file; the server reads it at the next rollout."""
        port = int(self.url.rpartition(":")[2])
        values = {"port": port, "models": list(models)} | fields
        self.config_path.write_text(yaml.safe_dump(values))

    def roll_out(self) -> str:
        """Send a SIGHUP and return what the server prints about the rollout."""
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
        """Return the server's live processes whose program name contains `title`, oldest first."""
        found = []
        for pid in session_members(self.process.pid):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if title in " ".join(process.cmdline()[:1]):
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def loads(self, deployment: str = "Replica-apar-tiny") -> list[dict[str, Any]]:
        """Return the load that each replica of a deployment reports."""
        return self.answers(deployment)

    def answers(self, asked: str) -> list[Any]:
        """Return what `serve_and_look` answers to a question."""
        question = self.config_path.with_suffix(".ask")
        answer = self.config_path.with_suffix(".loads")
        answer.unlink(missing_ok=True)
        # The other process must not find a file that is still empty.
        part = question.with_suffix(".asking")
        part.write_text(asked)
        part.replace(question)
        deadline = time.monotonic() + LOOK_S
        while not answer.exists():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        found = json.loads(answer.read_text())
        return found if isinstance(found, list) else []

    def records(self) -> list[dict[str, Any]]:
        """Return the request log."""
        files = [self.log] if self.log_folder is None else list(self.log_folder.glob("*.jsonl"))
        found = []
        for line in (line for file in files for line in _lines(file)):
            with suppress(ValueError):  # Some lines are not JSON, and the last may be incomplete.
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") == "request":
                    found.append(event)
        return found

    def record(self, request_id: str) -> dict[str, Any]:
        """Return a request's log record, which is written just after the end of its answer."""
        deadline = time.monotonic() + LOG_S
        while True:
            found = [each for each in self.records() if each["request_id"] == request_id]
            if found:
                assert len(found) == 1
                return found[0]
            assert time.monotonic() < deadline, f"no log record of request {request_id}"
            time.sleep(0.05)

    def wait_until_idle(
        self,
        num_replicas: int = 1,
        timeout_s: float = 60.0,
        deployment: str = "Replica-apar-tiny",
    ) -> dict[str, Any]:
        """Wait until the replicas hold nothing of any request; return the load of the first.

        Fails when a request, a thread or a block remains.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            loads = self.loads(deployment)
            busy = [
                load
                for load in loads
                if load["requests_inside"]
                or load["threads"]
                or load["free_blocks"] != load["kv_blocks"]
            ]
            if len(loads) == num_replicas and not busy:
                return loads[0]
            assert time.monotonic() < deadline, loads
            time.sleep(0.1)

    def wait_for_replicas(self, number: int, timeout_s: float = START_S) -> None:
        """Wait until this many engines run and the server is healthy."""
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(httpx.HTTPError):
                healthy = httpx.get(f"{self.url}/health", timeout=5).status_code == 200
                if healthy and len(self.processes(ENGINE)) == number:
                    return
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)


@contextmanager
def held(processes: list[psutil.Process]) -> Iterator[None]:
    """Stop processes: while engines are held, no running request ends, however fast the machine.

    A replica gives its engine up after two waits of 25 s (`ENGINE_ANSWER_S`).
    """
    with ExitStack() as resumed:
        for process in processes:
            process.suspend()
            resumed.callback(_resume, process)
        yield


def _resume(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()


@contextmanager
def slowed(processes: list[psutil.Process]) -> Iterator[None]:
    """Let processes work a twentieth of the time.

    Between two pieces of a slowed engine's stream there are few tokens, on a fast machine too.
    """
    ended = threading.Event()

    def every(action: Callable[[psutil.Process], None]) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                action(process)

    def slow() -> None:
        while not ended.wait(RESTING_S):
            every(psutil.Process.resume)
            ended.wait(WORKING_S)
            every(psutil.Process.suspend)
        every(psutil.Process.resume)

    every(psutil.Process.suspend)
    executor = threading.Thread(target=slow)
    executor.start()
    try:
        yield
    finally:
        ended.set()
        executor.join()


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines()


@contextmanager
def serving(folder: Path, *models: dict[str, Any], **fields: Any) -> Iterator[Server]:
    """Serve these models; at the end, stop the server and check that no process is left."""
    config, log, port = folder / "config.yaml", folder / "log", free_port()
    config.write_text(yaml.safe_dump({"port": port, "models": list(models)} | fields))
    logs = fields.get("logging", {}).get("folder")
    with apar_serve("--config", str(config), log=log, main=WINDOW) as process:
        wait_for(log, "Press Ctrl-C to stop", process)
        url = f"http://127.0.0.1:{port}"
        try:
            yield Server(process, config, log, url, None if logs is None else Path(logs))
        except BaseException:
            keep_ray_logs(process.pid)
            raise
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=STOP_S)
        left = session_members(process.pid)
        assert left == set(), [psutil.Process(pid).cmdline() for pid in left]
