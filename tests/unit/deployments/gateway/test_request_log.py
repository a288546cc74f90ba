"""The log line of each request."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.config.logging import LoggingConfig
from deployments.logs import ProcessLogs
from deployments.wire.response import Piece, ResponseEnd, ResponseStart
from tests.fakes.log_files import lines, process_logs
from tests.fakes.replicas import CHAT, EVENTS, JSON, FakeReplicas, client

END = ResponseEnd(
    prompt_tokens=3,
    generated_tokens=9,
    threads=4,
    forks=3,
    critical_path_tokens=5,
    replica="r-7",
    replica_s=0.5,
    engine_s=0.25,
)
BODY = {"model": "m", "messages": [{"role": "user", "content": "a secret question"}]}


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[ProcessLogs]:
    with process_logs(tmp_path / "logs") as process:
        yield process


@pytest.fixture
def named_by_vllm() -> Iterator[None]:
    """Log records with the attributes that vLLM and Ray add."""
    make = logging.getLogRecordFactory()

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make(*args, **kwargs)
        made.vllm_process_name, made._ray_timestamp_ns = "MainProcess", 1
        return made

    logging.setLogRecordFactory(record)
    yield
    logging.setLogRecordFactory(make)


@pytest.mark.usefixtures("named_by_vllm")
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_request_is_one_line_at_its_end(
    logs: ProcessLogs, tmp_path: Path, streaming: bool
) -> None:
    piece = Piece(b'data: {"secret":"answer"}\n\n', num_tokens=4, certain_tokens=7)
    parts = (piece,) if streaming else ()
    start = ResponseStart(
        200, EVENTS if streaming else JSON, b"data: {}\n\n", num_tokens=5, certain_tokens=5
    )
    http = client(FakeReplicas(start, *parts, end=END))

    await http.post(CHAT, json=BODY | {"stream": streaming}, headers={"x-request-id": "r1"})
    logs.close()

    (line,) = lines(tmp_path)
    assert line.pop("time").endswith("+00:00")
    times = [line.pop(name) for name in ("queue_s", "sent_s", "first_byte_s", "total_s")]
    assert times == sorted([0.0, *times])[1:]
    certain_s, silence_s = line.pop("certain_s"), line.pop("longest_silence_s")
    if streaming:
        assert times[1] <= certain_s <= times[-1]
        assert 0 <= silence_s <= times[-1]
    else:
        assert (certain_s, silence_s) == (None, None)
    assert line == {
        "level": "INFO",
        "logger": "deployments.gateway.request_log",
        "event": "request",
        "request_id": "r1",
        "method": "POST",
        "path": CHAT,
        "key": "anonymous",
        "model": "m",
        "adapter": None,
        "fallback_of": None,
        "status": 200,
        "error_code": None,
        "stream": streaming,
        "prompt_tokens": 3,
        "generated_tokens": 9,
        "replica": "r-7",
        "replica_s": 0.5,
        "engine_s": 0.25,
        "threads": 4,
        "forks": 3,
        "retries": 0,
        "continued": 0,
        "cancelled": False,
        "trace_id": None,
        "batch_id": None,
    }


async def test_a_request_that_was_refused_has_its_reason(logs: ProcessLogs, tmp_path: Path) -> None:
    http = client(FakeReplicas(ResponseStart(400, JSON, b'{"error":{"message":"a"}}')))

    await http.post(CHAT, json={"model": "none"})
    await http.get("/health")
    await http.post(CHAT, json={"model": "m", "stream": True})
    logs.close()

    first, second = lines(tmp_path)
    assert (first["status"], first["error_code"], first["queue_s"]) == (
        404,
        "model_not_found",
        None,
    )
    assert (second["status"], second["error_code"], second["threads"]) == (400, None, 0)


@pytest.mark.usefixtures("simulated_time")
async def test_a_request_whose_client_left_is_logged_as_such(
    logs: ProcessLogs, tmp_path: Path
) -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b"{}"))
    replicas.gate.clear()
    task = asyncio.create_task(client(replicas).post(CHAT, json=BODY))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    logs.close()

    (line,) = lines(tmp_path)
    assert (line["cancelled"], line["status"], line["prompt_tokens"]) == (True, None, None)


async def test_text_is_logged_only_if_configured(logs: ProcessLogs, tmp_path: Path) -> None:
    whole = json.dumps({"choices": [{"message": {"content": "secret 1"}}]}).encode()
    chunk = b'data: {"choices":[{"index":%d,"delta":{"content":"%s"}}]}\n\n'
    streamed = [chunk % (0, b"se"), chunk % (1, b"x"), chunk % (0, b"cret 2"), b"data: [DONE]\n\n"]
    parts = [Piece(each) for each in streamed[1:]]
    config = LoggingConfig(content=True)

    choices: tuple[dict[str, Any], ...] = ({}, {"logging": config})
    for settings in choices:
        await client(FakeReplicas(ResponseStart(200, JSON, whole)), **settings).post(
            CHAT, json=BODY
        )
        await client(
            FakeReplicas(ResponseStart(200, EVENTS, streamed[0]), *parts), **settings
        ).post(CHAT, json=BODY | {"stream": True})
    logs.close()

    silent, also_silent, first, second = lines(tmp_path)
    assert "secret" not in json.dumps([silent, also_silent])
    assert first["prompt"] == second["prompt"] == BODY["messages"]
    assert first["answer"] == ["secret 1"]
    assert second["answer"] == ["secret 2", "x"]


async def test_a_prompt_with_a_lone_surrogate_is_logged_unchanged(
    logs: ProcessLogs, tmp_path: Path
) -> None:
    whole = ResponseStart(200, JSON, b'{"choices": [{"message": {"content": "half \\udc00"}}]}')
    http = client(FakeReplicas(whole), logging=LoggingConfig(content=True))
    body = b'{"model": "m", "messages": [{"role": "user", "content": "caf\\u00e9 \\ud800 end"}]}'

    answer = await http.post(CHAT, content=body)
    logs.close()

    assert answer.status_code == 200
    (line,) = lines(tmp_path)
    assert line["prompt"] == [{"role": "user", "content": "caf\u00e9 \ud800 end"}]
    assert line["answer"] == ["half \udc00"]
