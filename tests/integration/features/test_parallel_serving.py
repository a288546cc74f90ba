"""Engines of several processes behind `apar serve`, set up in its configuration file."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from vllm.config import CompilationMode

from tests.fakes.waiting import wait_until
from tests.integration.serving.apar_process import ENGINE, TINY, Server, authorization, serving
from tests.integration.serving.killed_streams import Answer, stream
from tests.integration.serving.metrics_reading import metrics_url, read

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

WORKER = "VLLM::Worker"
CLIENTS = 6
START_S = 280.0


@dataclass(frozen=True, slots=True)
class Way:
    """Engine arguments, the processes that they start, and what each of those is called."""

    engine: dict[str, Any]
    title: str
    num_processes: int


WAYS = {
    "data": Way({"data_parallel_size": 2}, ENGINE, 2),
    "tensor": Way({"tensor_parallel_size": 2}, WORKER, 2),
    # vLLM's pipeline stages on a CPU need a compiled model; this backend compiles nothing.
    "pipeline": Way(
        {
            "pipeline_parallel_size": 2,
            "enforce_eager": False,
            "compilation_config": {
                "mode": CompilationMode.DYNAMO_TRACE_ONCE.value,
                "backend": "eager",
            },
        },
        WORKER,
        2,
    ),
}


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(way: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = TINY | {"engine": TINY["engine"] | WAYS[way].engine}
    # An engine of several processes takes longer to start than the default.
    retries = {"replica_wait_s": START_S}
    with serving(tmp_path_factory.mktemp(way), model, retries=retries) as server:
        yield server


@pytest.fixture(scope="module")
def alone(server: Server) -> Answer:
    """The stream that the others are compared with, read alone."""
    return stream(server, "chat")


def seen(answer: Answer) -> tuple[str, list[str], list[dict[str, Any]], list[Any]]:
    return answer.text, answer.finish, answer.usage, answer.errors


def pids(server: Server, way: str) -> set[int]:
    return {process.pid for process in server.processes(WAYS[way].title)}


def test_streams_at_once_are_those_alone_and_leave_nothing(
    server: Server, way: str, alone: Answer
) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda _: stream(server, "chat"), range(CLIENTS)))

    assert alone.apar[0]["forks"] >= 3
    assert [seen(answer) for answer in answers] == [seen(alone)] * CLIENTS
    assert len(pids(server, way)) == WAYS[way].num_processes
    server.wait_until_idle()
    page = read(metrics_url(server))
    written = sorted(
        (labels["engine"], value)
        for name, labels, value in page.samples
        if name == "vllm:generation_tokens_total"
    )
    # Each rank of data parallelism has a part of the requests.
    assert [rank for rank, tokens in written if tokens > 0] == (
        ["0", "1"] if way == "data" else ["0"]
    )


def test_clients_that_leave_free_every_rank(server: Server, alone: Answer) -> None:
    def leave(number: int) -> str:
        body = {
            "messages": [{"role": "user", "content": f"Give me {number + 3} tips for sleeping."}],
            "temperature": 0,
            "max_tokens": 400,
            "stream": True,
        }
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=authorization(), timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if chunk["choices"][0]["delta"].get("content"):
                        return str(chunk)
        return ""

    with ThreadPoolExecutor(CLIENTS) as pool:
        left = list(pool.map(leave, range(CLIENTS)))

    assert all(left)
    load = server.wait_until_idle()
    assert load["kv_blocks"] > 0
    assert seen(stream(server, "chat")) == seen(alone)


@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
def test_a_stream_outlives_the_end_of_any_process(
    server: Server, way: str, alone: Answer, place: int
) -> None:
    server.wait_until_idle()
    before = pids(server, way)
    victim = server.processes(WAYS[way].title)[place]

    answer = stream(server, "chat", 2, lambda: victim.send_signal(signal.SIGKILL))

    assert seen(answer) == seen(alone)
    server.wait_until_idle()
    wait_until(lambda: len(pids(server, way)) == WAYS[way].num_processes)
    # The other process of the engine has ended too.
    assert not any(psutil.pid_exists(pid) for pid in before)
