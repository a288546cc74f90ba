"""An engine process that receives SIGTERM hands its requests over: no answer is cut short.

Requests that end without an answer are charged too.
"""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.serving.apar_process import (
    ENGINE,
    TINY,
    Server,
    held,
    serving,
    slowed,
)
from tests.integration.serving.killed_streams import BODIES, TIMEOUT_S, Victims, stream

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
LOG_S = 60.0


class Told(Victims):
    """Sends SIGTERM to the busiest engine."""

    def end(self) -> psutil.Process:
        process = self.busiest()
        process.terminate()
        return process

    def end_at_work(self) -> None:
        """Send it once the engine works; until then the engines are slow."""
        with slowed(self._engines):
            self.wait_for_work()
            self.end()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, logs: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("told")
    with serving(folder, TINY | {"replicas": 2}, logging={"folder": str(logs)}) as server:
        yield server


def line(logs: Path, request_id: str) -> dict[str, Any]:
    """Wait for the log record of a request."""
    deadline = time.monotonic() + LOG_S
    while True:
        lines = [
            json.loads(text)
            for file in logs.rglob("*")
            if file.is_file()
            for text in file.read_text().splitlines()
            if f'"{request_id}"' in text
        ]
        found: list[dict[str, Any]] = [each for each in lines if each.get("event") == "request"]
        if found:
            return found[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def whole_body(name: str) -> tuple[str, dict[str, Any]]:
    path, body = BODIES[name]
    return path, body | {"temperature": 0}


@pytest.mark.parametrize("name", ["chat", pytest.param("unforked chat", marks=pytest.mark.slow)])
def test_stream_goes_on_at_another_replica_and_the_one_behind_it_is_replaced(
    server: Server, logs: Path, name: str
) -> None:
    server.wait_for_replicas(2)
    expected = stream(server, name)
    told = Told(server)
    ended: list[psutil.Process] = []

    answer = stream(server, name, 12, lambda: ended.append(told.end()))

    assert answer.errors == []
    assert answer.text == expected.text
    assert (answer.finish, answer.usage) == (expected.finish, expected.usage)
    assert line(logs, answer.request_id)["continued"] >= 1
    assert psutil.wait_procs(ended, timeout=TIMEOUT_S)[1] == []
    server.wait_for_replicas(2)


def test_whole_answer_comes_from_another_replica(server: Server, logs: Path) -> None:
    server.wait_for_replicas(2)
    path, body = whole_body("unforked chat")
    expected = httpx.post(server.url + path, json=body, timeout=TIMEOUT_S).json()
    ending = threading.Thread(target=Told(server).end_at_work)

    ending.start()
    headers = {"x-request-id": "told-whole"}
    answer = httpx.post(server.url + path, json=body, headers=headers, timeout=TIMEOUT_S)
    ending.join()

    assert answer.status_code == 200
    assert answer.json()["choices"] == expected["choices"]
    # The next attempt may find the same replica, just before its process ends.
    assert 1 <= line(logs, "told-whole")["retries"] <= 2


def test_client_that_leaves_pays_for_what_was_generated(server: Server, logs: Path) -> None:
    server.wait_for_replicas(2)
    path, body = whole_body("unforked chat")
    headers = {"x-request-id": "left-whole"}

    working = Told(server)
    with ThreadPoolExecutor(1) as executor:
        asked = executor.submit(
            httpx.post,
            server.url + path,
            json=body | {"max_tokens": 1900},
            headers=headers,
            timeout=httpx.Timeout(TIMEOUT_S, read=10),
        )
        working.wait_for_work()
        with held(server.processes(ENGINE)), pytest.raises(httpx.ReadTimeout):
            asked.result()

    found = line(logs, "left-whole")
    assert found["cancelled"]
    assert 0 < found["generated_tokens"] < 1900


def test_beam_search_pays_for_all_its_beams(server: Server, logs: Path) -> None:
    path, body = whole_body("unforked chat")
    fields = {"use_beam_search": True, "n": 3, "max_tokens": 5}
    headers = {"x-request-id": "beams"}

    answer = httpx.post(server.url + path, json=body | fields, headers=headers, timeout=TIMEOUT_S)

    assert answer.status_code == 200
    found = line(logs, "beams")
    assert found["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    # One beam in the first step, then three in each.
    assert found["generated_tokens"] == 1 + 4 * 3
