"""`apar serve` starts, answers, and leaves no process behind."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import openai
import psutil
import pytest

from cluster.local_ray import free_port
from tests.integration.serving.apar_process import (
    REPLICA,
    START_S,
    STOP_S,
    apar_serve,
    ray_folders,
    session_members,
    wait_for,
)

pytestmark = pytest.mark.cluster


def is_replica(pid: int) -> bool:
    """Return whether this is the process of a replica."""
    with suppress(psutil.NoSuchProcess):
        return REPLICA in " ".join(psutil.Process(pid).cmdline())
    return False


@pytest.mark.ci
def test_the_default_model_is_served_until_ctrl_c_stops_everything(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    config = tmp_path / "config.yaml"
    config.write_text("models: [{cpu_threads: 1}]\n")
    with apar_serve("--port", str(port), "--config", str(config), log=log) as process:
        said = wait_for(log, "Press Ctrl-C to stop", process)
        command = next(line for line in said.splitlines() if line.startswith("curl "))
        answer = subprocess.run(command, shell=True, capture_output=True, timeout=60, check=True)
        logged = wait_for(log, '"event": "request"', process)
        # Closed before the server stops: its side of an open connection would keep the port.
        with (
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
            pytest.raises(openai.BadRequestError, match="configured without `replay: true`"),
        ):
            client.completions.create(
                model="apar-tiny", prompt="Hi", extra_body={"apar": {"replay": {"": [5, 2]}}}
            )
        members = session_members(process.pid)
        (folder,) = ray_folders(members)
        # The terminal sends Ctrl-C to every process of the foreground group.
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=STOP_S)

    assert b'"choices":[' in answer.stdout
    assert '"status": 200' in logged
    assert process.returncode == 0
    assert session_members(process.pid) == set()
    assert len(members) > 5
    assert not folder.exists()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


@pytest.mark.ci
def test_sigterm_while_starting_stops_everything(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tiny = ("--model", "apar-tiny")
    with apar_serve(*tiny, "--port", str(free_port()), log=log) as process:
        wait_for(log, "Starting apar-tiny", process)
        while not [pid for pid in session_members(process.pid) if is_replica(pid)]:
            assert process.poll() is None
            time.sleep(0.2)
        # To the whole process group, as supervisors do; Ray's processes must not receive it.
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=STOP_S)

    assert process.returncode == 0, log.read_text()
    assert session_members(process.pid) == set()


def test_a_port_in_use_is_reported_before_anything_starts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with apar_serve("--port", str(port), log=log) as process:
            process.wait(timeout=STOP_S)

    said = log.read_text()
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another" in said
    assert "--port" in said
    assert "Starting" not in said


@pytest.mark.ci
def test_an_engine_that_does_not_start_tells_why_and_leaves_only_its_log(tmp_path: Path) -> None:
    log, file = tmp_path / "log", tmp_path / "serve.yaml"
    file.write_text("models: [{kv_cache_gib: 0.001}]")
    with apar_serve("--config", str(file), "--port", str(free_port()), log=log) as process:
        process.wait(timeout=START_S)

    # Beside the log of events, in which the engine says how it forks.
    starting, cause, remedy, where = (
        line for line in log.read_text().splitlines() if not line.startswith("{")
    )
    kept = Path(where.removeprefix("Log: "))
    assert process.returncode == 1
    assert starting == "Starting apar-tiny ..."
    assert cause.startswith("Error: ValueError: To serve at least one request with")
    assert "Raise the model's `kv_cache_gib`" in remedy
    assert "EngineCore failed to start." in kept.read_text()
    assert kept.parents[1].stat().st_mode & 0o777 == 0o700
    shutil.rmtree(kept.parents[1])
    assert session_members(process.pid) == set()


def test_a_missing_folder_is_reported_before_anything_starts(tmp_path: Path) -> None:
    log, missing = tmp_path / "log", tmp_path / "missing"
    with apar_serve("--model", str(missing), "--port", str(free_port()), log=log) as process:
        process.wait(timeout=STOP_S)

    assert process.returncode == 1
    assert f"no such folder: {missing}" in log.read_text().replace("\n", "")
