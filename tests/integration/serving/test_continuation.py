"""Streams go on, and whole answers come, though the replica that serves them is killed."""

import json
import threading
import time
from collections.abc import Callable, Iterator
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
        {"messages": [{"role": "user", "content": PROMPT}], "stop": ["\n4."]},
    ),
}
KILL_AFTER = (1, 12, 45)
TIMEOUT_S = 120.0
REST_S, REST_SHARE, REST_WAIT_S = 0.5, 0.1, 60.0
"""An engine that rests takes less than this share of a core over so many seconds."""


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
    url: str, name: str, after_texts: int | None = None, then: Callable[[], None] | None = None
) -> Answer:
    """A stream to its end; `then` is called once, after so many pieces of text."""
    path, body = BODIES[name]
    body = body | {
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    answer, done = Answer(), False
    with httpx.stream("POST", url + path, json=body, timeout=TIMEOUT_S) as response:
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
    return answer


class Victims:
    """Finds the process that has worked since it was last looked at."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = self._cpu_s()
        self._wait_for_rest()

    def _wait_for_rest(self) -> None:
        """Return when no engine works: one that has just started may look busier than a victim."""
        deadline = time.monotonic() + REST_WAIT_S
        while time.monotonic() < deadline:
            time.sleep(REST_S)
            before, self._before = self._before, self._cpu_s()
            if before.keys() == self._before.keys() and all(
                self._before[pid] - spent < REST_SHARE * REST_S for pid, spent in before.items()
            ):
                return
        raise AssertionError(f"an engine has worked for {REST_WAIT_S} s without a request")

    def _cpu_s(self) -> dict[int, float]:
        times = {}
        for process in self._server.processes(ENGINE):
            spent = process.cpu_times()
            times[process.pid] = spent.user + spent.system
        return times

    def busiest(self) -> psutil.Process:
        """The engine that has worked most since the last look."""
        now = self._cpu_s()
        busiest = max(now, key=lambda pid: now[pid] - self._before.get(pid, 0.0))
        self._before = now
        return psutil.Process(busiest)

    def kill(self, *, replica: bool) -> None:
        """Kill the busiest engine, or the replica whose engine it is."""
        victim = self.busiest()
        (victim.parent() if replica else victim).kill()  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("continuation"), TINY | {"replicas": 2}) as server:
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
    expected = stream(server.url, name)
    kill_after = KILL_AFTER[list(BODIES).index(name) % len(KILL_AFTER)]
    victims = Victims(server)

    answer = stream(server.url, name, kill_after, lambda: victims.kill(replica=kills_replica))

    assert answer.errors == []
    assert answer.text == expected.text
    assert (answer.finish, answer.usage) == (expected.finish, expected.usage)
    assert answer.apar == expected.apar
    assert len(answer.ids) == 1
    assert answer.roles == expected.roles


@pytest.mark.slow
def test_stream_that_loses_two_replicas_goes_on_at_the_third(server: Server) -> None:
    server.wait_for_replicas(2)
    expected = stream(server.url, "unforked chat")
    victims = Victims(server)
    kills: list[int] = []

    def kill() -> None:
        victims.kill(replica=True)
        kills.append(len(kills) + 1)

    def kill_now_and_again() -> None:
        kill()
        threading.Timer(0.3, kill).start()

    answer = stream(server.url, "unforked chat", 3, kill_now_and_again)

    assert kills == [1, 2]
    assert (answer.errors, answer.text) == ([], expected.text)
    assert (answer.finish, answer.usage) == (expected.finish, expected.usage)


@pytest.mark.parametrize("kills_replica", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_whole_answer_whose_replica_is_killed_comes_all_the_same(
    server: Server, kills_replica: bool
) -> None:
    server.wait_for_replicas(2)
    path, body = BODIES["unforked chat"]
    body = body | {"temperature": 0}
    expected = httpx.post(server.url + path, json=body, timeout=TIMEOUT_S).json()
    victims = Victims(server)
    killer = threading.Timer(0.3, lambda: victims.kill(replica=kills_replica))

    killer.start()
    answer = httpx.post(server.url + path, json=body, timeout=TIMEOUT_S)
    killer.join()

    assert answer.status_code == 200
    assert answer.json()["choices"] == expected["choices"]


def test_client_that_leaves_while_its_stream_is_moved_leaves_nothing(server: Server) -> None:
    server.wait_for_replicas(2)
    path, body = BODIES["unforked chat"]
    body = body | {"stream": True, "max_tokens": 1500}
    victims = Victims(server)
    with httpx.stream("POST", server.url + path, json=body, timeout=TIMEOUT_S) as response:
        lines = response.iter_lines()
        for _ in range(10):
            next(lines)
        victims.kill(replica=True)
        for _ in range(40):
            next(lines)

    server.wait_for_replicas(2)
    server.wait_until_idle(2)


def test_nothing_of_continued_streams_is_left(server: Server) -> None:
    server.wait_for_replicas(2)

    server.wait_until_idle(2)
