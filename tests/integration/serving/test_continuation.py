"""Streams go on, and whole answers come, though the replica that serves them is killed."""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.serving.apar_process import ENGINE, TINY, Server, serving

pytestmark = pytest.mark.cluster

PROMPT = "Give me 5 tips for sleeping well."
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 400},
    ),
    "unforked chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 400,
            "ignore_eos": True,
        },
    ),
    "short chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60},
    ),
    "completion": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "repetition_penalty": 1.1},
    ),
    "chat that stops": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": PROMPT}],
            "stop": ["\n4."],
            # Forked, the answer has been generated before its first text can be sent.
            "apar": {"enabled": False},
        },
    ),
}
KILL_AFTER = {
    "chat": 1,
    "unforked chat": 45,
    "short chat": 3,
    "completion": 12,
    "chat that stops": 3,
}
"""Pieces of text after which a stream's replica is killed: early enough that more must come."""
TIMEOUT_S = 120.0
REST_S, REST_SHARE, REST_WAIT_S = 0.5, 0.1, 60.0
"""An engine that rests takes less than this share of a core over so many seconds."""
WORK_S, WORK_WAIT_S = 0.15, 30.0
"""An engine works on a request once it has taken this many seconds of a core."""


@dataclass
class Answer:
    """What a client has got of a stream."""

    text: str = ""
    num_texts: int = 0
    roles: int = 0
    ids: set[str] = field(default_factory=set)
    finish: list[str] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    apar: list[dict[str, Any]] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        self.ids.add(chunk["id"])
        for choice in chunk["choices"]:
            delta = choice.get("delta", choice)
            text = delta.get("content", delta.get("text")) or ""
            self.text += text
            self.num_texts += bool(text)
            self.roles += "role" in delta
            if choice["finish_reason"] is not None:
                self.finish.append(choice["finish_reason"])
        if not chunk["choices"]:
            self.usage.append(chunk["usage"])
            self.apar.append(chunk["apar"])


def stream(
    server: Server,
    name: str,
    after_texts: int | None = None,
    then: Callable[[], None] | None = None,
) -> Answer:
    """A stream to its end; `then` is called once, after this many pieces of text."""
    path, body = BODIES[name]
    body = body | {
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    answer, done = Answer(), False
    headers = {"x-request-id": answer.request_id}
    with httpx.stream(
        "POST", server.url + path, json=body, headers=headers, timeout=TIMEOUT_S
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line:
                continue
            assert not done
            if line == "data: [DONE]":
                done = True
                continue
            answer.take(json.loads(line.removeprefix("data: ")))
            if then is not None and answer.num_texts == after_texts:
                then()
                then = None
    assert done
    assert then is None, f"the stream had only {answer.num_texts} pieces of text"
    return answer


class Victims:
    """Finds the process that has worked since it was last looked at."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._engines = server.processes(ENGINE)
        self._before = self._cpu_s()
        self._wait_for_rest()

    def _wait_for_rest(self) -> None:
        """Return when no engine works: one that has just started may look busier than a victim."""
        deadline = time.monotonic() + REST_WAIT_S
        while time.monotonic() < deadline:
            time.sleep(REST_S)
            self._engines = self._server.processes(ENGINE)
            before, self._before = self._before, self._cpu_s()
            if before.keys() == self._before.keys() and all(
                self._before[pid] - spent < REST_SHARE * REST_S for pid, spent in before.items()
            ):
                return
        raise AssertionError(f"an engine has worked for {REST_WAIT_S} s without a request")

    def _cpu_s(self) -> dict[int, float]:
        # Of the engines that rested: to look for others would take longer than a short stream.
        times: dict[int, float] = {}
        for process in self._engines:
            with suppress(psutil.NoSuchProcess):
                spent = process.cpu_times()
                times[process.pid] = spent.user + spent.system
        return times

    def busiest(self) -> psutil.Process:
        """The engine that has worked most since the last look; no engine is returned twice."""
        now = self._cpu_s()
        busiest = max(now, key=lambda pid: now[pid] - self._before.get(pid, 0.0))
        self._before = now
        # An engine outlives its replica for a moment, with `apar serve` as its parent.
        self._engines = [engine for engine in self._engines if engine.pid != busiest]
        return psutil.Process(busiest)

    def wait_for_work(self) -> None:
        """Return once an engine has worked for some steps since the last look."""
        deadline = time.monotonic() + WORK_WAIT_S
        while not any(
            spent - self._before.get(pid, 0.0) > WORK_S for pid, spent in self._cpu_s().items()
        ):
            assert time.monotonic() < deadline, "no engine works"
            time.sleep(0.02)

    def kill(self, *, replica: bool) -> None:
        """Kill the busiest engine, or the replica whose engine it is."""
        victim = self.busiest()
        (victim.parent() if replica else victim).kill()  # type: ignore[union-attr]

    def kill_at_work(self, *, replica: bool) -> None:
        """Kill an engine or its replica once the engine works."""
        self.wait_for_work()
        self.kill(replica=replica)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("continuation")
    # A busy machine may need more than the default minute to start a replica.
    patient = {"replica_wait_s": 110}
    with serving(folder, TINY | {"replicas": 2}, retries=patient) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "kills_replica"),
    [
        pytest.param(name, replica, marks=() if name == "chat" else pytest.mark.slow)
        for name in BODIES
        for replica in (True, False)
    ],
)
def test_stream_whose_replica_is_killed_is_the_uninterrupted_one(
    server: Server, name: str, kills_replica: bool
) -> None:
    server.wait_for_replicas(2)
    expected = stream(server, name)
    victims = Victims(server)

    answer = stream(server, name, KILL_AFTER[name], lambda: victims.kill(replica=kills_replica))

    assert answer.errors == []
    assert answer.text == expected.text
    assert (answer.finish, answer.usage) == (expected.finish, expected.usage)
    assert answer.apar == expected.apar
    assert len(answer.ids) == 1
    assert answer.roles == expected.roles
    assert server.record(answer.request_id)["continued"] >= 1


@pytest.mark.slow
def test_stream_that_loses_two_replicas_goes_on_at_the_third(server: Server) -> None:
    server.wait_for_replicas(2)
    expected = stream(server, "unforked chat")
    victims = Victims(server)
    killer = threading.Thread(target=victims.kill_at_work, kwargs={"replica": True})

    def kill_now_and_again() -> None:
        victims.kill(replica=True)
        killer.start()

    answer = stream(server, "unforked chat", 3, kill_now_and_again)
    killer.join()

    assert (answer.errors, answer.text) == ([], expected.text)
    assert (answer.finish, answer.usage) == (expected.finish, expected.usage)
    assert server.record(answer.request_id)["continued"] >= 2


@pytest.mark.parametrize("kills_replica", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_whole_answer_whose_replica_is_killed_comes_all_the_same(
    server: Server, kills_replica: bool
) -> None:
    server.wait_for_replicas(2)
    path, body = BODIES["unforked chat"]
    body = body | {"temperature": 0}
    expected = httpx.post(server.url + path, json=body, timeout=TIMEOUT_S).json()
    victims = Victims(server)
    killer = threading.Thread(target=victims.kill_at_work, kwargs={"replica": kills_replica})
    headers = {"x-request-id": uuid.uuid4().hex}

    killer.start()
    answer = httpx.post(server.url + path, json=body, headers=headers, timeout=TIMEOUT_S)
    killer.join()

    assert answer.status_code == 200
    assert answer.json()["choices"] == expected["choices"]
    record = server.record(headers["x-request-id"])
    assert record["retries"] >= 1
    assert record["continued"] == 0


def test_client_that_leaves_while_its_stream_is_moved_leaves_nothing(server: Server) -> None:
    server.wait_for_replicas(2)
    path, body = BODIES["unforked chat"]
    body = body | {"stream": True, "max_tokens": 1500}
    headers = {"x-request-id": uuid.uuid4().hex}
    victims = Victims(server)
    with httpx.stream(
        "POST", server.url + path, json=body, headers=headers, timeout=TIMEOUT_S
    ) as response:
        lines = response.iter_lines()
        for _ in range(10):
            next(lines)
        victims.kill(replica=True)
        # More than the killed replica can have sent, and less than the answer has.
        for _ in range(400):
            next(lines)

    record = server.record(headers["x-request-id"])
    assert record["continued"] >= 1
    assert record["cancelled"] is True
    server.wait_for_replicas(2)
    server.wait_until_idle(2)


def test_nothing_of_continued_streams_is_left(server: Server) -> None:
    server.wait_for_replicas(2)

    server.wait_until_idle(2)
