"""Streams to read, and the processes to kill while they are read."""

import json
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.fakes.tagged_streams import TaggedReader
from tests.integration.serving.apar_process import ENGINE, Server, authorization, slowed

PROMPT = "Give me 5 tips for sleeping well."
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 400},
    ),
    "tagged chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 400,
            "apar": {"stream": "threads"},
        },
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
TIMEOUT_S = 300.0
REST_S, REST_SHARE, REST_WAIT_S = 0.5, 0.1, 60.0
"""An idle engine uses less than this share of a core during REST_S."""
WORK_S, WORK_WAIT_S = 0.15, 30.0
"""CPU seconds after which an engine counts as working on a request."""


@dataclass
class Answer:
    """What a client has received of a stream."""

    text: str = ""
    num_texts: int = 0
    roles: int = 0
    ids: set[str] = field(default_factory=set)
    finish: list[str] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    apar: list[dict[str, Any]] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    reader: TaggedReader = field(default_factory=TaggedReader)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        self.ids.add(chunk["id"])
        written = False
        if "updates" in chunk.get("apar", ()):
            self.reader.read(chunk["apar"])
            written = any(update["text"] for update in chunk["apar"].pop("updates"))
            del chunk["apar"]["time_ms"]
        for choice in chunk["choices"]:
            delta = choice.get("delta", choice)
            text = delta.get("content", delta.get("text")) or ""
            self.text += text
            self.num_texts += bool(text or written)
            self.roles += "role" in delta
            if choice["finish_reason"] is not None:
                self.finish.append(choice["finish_reason"])
        if not chunk["choices"]:
            # What the cache held depends on the replica.
            details = ("prompt_tokens_details", "completion_tokens_details")
            self.usage.append({k: v for k, v in chunk["usage"].items() if k not in details})
            self.apar.append(chunk["apar"])


def stream(
    server: Server,
    name: str,
    after_texts: int | None = None,
    then: Callable[[], None] | None = None,
) -> Answer:
    """Read a stream to its end; call `then` once, after this many pieces of text."""
    path, body = BODIES[name]
    return read_stream(server, path, body, lambda answer: answer.num_texts == after_texts, then)


def read_stream(
    server: Server,
    path: str,
    body: dict[str, Any],
    when: Callable[[Answer], bool] = lambda _: False,
    then: Callable[[], None] | None = None,
    *,
    in_order: bool = True,
) -> Answer:
    """Read a stream to its end; call `then` at the first chunk for which `when` is true.

    Until then the engines are slow, so that the answer is not complete before. `in_order` is as for
    `TaggedReader`.
    """
    body = body | {
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    answer, done = Answer(reader=TaggedReader(in_order=in_order)), False
    headers = authorization() | {"x-request-id": answer.request_id}
    with ExitStack() as slow, httpx.Client(timeout=TIMEOUT_S) as client:
        if then is not None:
            slow.enter_context(slowed(server.processes(ENGINE)))
        with client.stream("POST", server.url + path, json=body, headers=headers) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if not line:
                    continue
                assert not done
                if line == "data: [DONE]":
                    done = True
                    continue
                answer.take(json.loads(line.removeprefix("data: ")))
                if then is not None and when(answer):
                    then()
                    then = None
                    slow.close()
    assert done
    assert then is None, f"the stream had only {answer.num_texts} pieces of text"
    return answer


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, by Linux's clock of it: psutil's are multiples of 10 ms.

    Raises OSError if there is none. A slowed engine may have worked for a few milliseconds only.
    """
    return time.clock_gettime((~pid << 3) | 2)  # `clock_getcpuclockid` of the C library


class Victims:
    """Finds the engine that works on a request, and kills it or its replica."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._engines = server.processes(ENGINE)
        self._before = self._cpu_s()
        self._wait_for_rest()

    def _wait_for_rest(self) -> None:
        """Wait until no engine works: one that has just started may look busier than the victim."""
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
        # Only engines that were idle: looking for others would take longer than a short stream.
        times: dict[int, float] = {}
        for process in self._engines:
            with suppress(OSError):
                times[process.pid] = cpu_s(process.pid)
        return times

    def busiest(self) -> psutil.Process:
        """Return the engine that has used most CPU since the last call, each only once."""
        now = self._cpu_s()
        busiest = max(now, key=lambda pid: now[pid] - self._before.get(pid, 0.0))
        self._before = now
        # An engine outlives its replica for a moment, with `apar serve` as its parent.
        self._engines = [engine for engine in self._engines if engine.pid != busiest]
        return psutil.Process(busiest)

    def wait_for_work(self) -> None:
        """Wait until an engine has worked for some steps since the last call."""
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
        """Kill an engine or its replica once the engine works; until then the engines are slow."""
        with slowed(self._engines):
            self.wait_for_work()
            self.kill(replica=replica)
