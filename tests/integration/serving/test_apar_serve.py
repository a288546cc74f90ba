"""`apar serve` as a user runs it: starts, answers, and leaves no process behind."""

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import openai
import psutil
import pytest

from cluster.local_ray import free_port
from tests.integration.random_checkpoint import write_checkpoint
from tests.integration.serving.apar_process import (
    START_S,
    STOP_S,
    apar_serve,
    session_members,
    wait_for,
)

pytestmark = pytest.mark.cluster


def folders_of(members: set[int]) -> set[Path]:
    """Ray's temporary folders, as the command lines of its processes name them."""
    lines = " ".join(" ".join(psutil.Process(pid).cmdline()) for pid in members)
    return {Path(name) for name in re.findall(r"/tmp/apar-\w+", lines)}


def test_ctrl_c_stops_everything_that_was_started(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    config = tmp_path / "config.yaml"
    config.write_text("models: [{cpu_threads: 1}]\n")
    with apar_serve("--port", str(port), "--config", str(config), log=log) as process:
        said = wait_for(log, "Press Ctrl-C to stop", process)
        command = next(line for line in said.splitlines() if line.startswith("curl "))
        answer = subprocess.run(command, shell=True, capture_output=True, timeout=60, check=True)
        members = session_members(process.pid)
        (folder,) = folders_of(members)
        # The terminal sends Ctrl-C to every process of the foreground group.
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=STOP_S)

    assert b'"choices":[' in answer.stdout
    assert process.returncode == 0
    assert session_members(process.pid) == set()
    assert len(members) > 5
    assert not folder.exists()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_an_ordinary_model_is_served_beside_an_apar_one(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    plain = write_checkpoint(tmp_path / "plain")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"port: {port}\n"
        "models:\n"
        "  - checkpoint: apar-tiny\n"
        "    cpu_threads: 1\n"
        f"  - {{checkpoint: {plain}, cpu_threads: 1, kv_cache_gib: 0.1, max_concurrency: 4,\n"
        "     engine: {enforce_eager: true}}\n"
    )
    with apar_serve("--config", str(config), log=log) as process:
        wait_for(log, "Press Ctrl-C to stop", process)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        served = [model.id for model in client.models.list()]
        answers = {
            name: client.completions.create(
                model=name, prompt="Give me 3 tips for sleeping well.", max_tokens=40, temperature=0
            )
            for name in served
        }
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        process.send_signal(signal.SIGINT)
        process.wait(timeout=STOP_S)

    assert served == ["apar-tiny", "plain"]
    assert (answers["apar-tiny"].model_extra or {})["apar"]["forks"] > 0
    assert "apar" not in (answers["plain"].model_extra or {})
    assert {name: answer.model for name, answer in answers.items()} == {n: n for n in served}
    assert process.returncode == 0
    assert session_members(process.pid) == set()


def test_sigterm_while_starting_stops_everything(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with apar_serve("--port", str(free_port()), log=log) as process:
        wait_for(log, "Starting apar-tiny", process)
        time.sleep(8)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=STOP_S)

    assert process.returncode == 0, log.read_text()
    assert session_members(process.pid) == set()


def test_a_port_in_use_is_said_before_anything_is_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        with apar_serve("--port", str(port), log=log) as process:
            process.wait(timeout=STOP_S)

    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in log.read_text()
    assert time.monotonic() - started < 10


def test_a_model_that_cannot_be_loaded_is_an_error_and_nothing_stays(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "no-model"
    folder.mkdir()
    with apar_serve("--model", str(folder), "--port", str(free_port()), log=log) as process:
        process.wait(timeout=START_S)

    said = log.read_text()
    assert process.returncode == 1
    assert "Error:" in said
    assert "no-model" in said
    assert session_members(process.pid) == set()


def test_a_missing_folder_is_said_before_anything_is_started(tmp_path: Path) -> None:
    log, missing = tmp_path / "log", tmp_path / "missing"
    with apar_serve("--model", str(missing), "--port", str(free_port()), log=log) as process:
        process.wait(timeout=STOP_S)

    assert process.returncode == 1
    assert f"no such folder: {missing}" in log.read_text().replace("\n", "")
