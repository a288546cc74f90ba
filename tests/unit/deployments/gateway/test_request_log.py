"""The log line of each request, and the log files."""

import asyncio
import io
import json
import logging
import threading
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import CapacityError
from cluster.config import ClusterConfig
from cluster.config.logging import LoggingConfig
from cluster.logs import LogFollower, ProcessLogs, log_folder, shown_logs
from deployments.wire.answer import AnswerEnd, AnswerStart, Piece
from tests.fakes.replicas import CHAT, EVENTS, JSON, FakeReplicas, client

END = AnswerEnd(
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
    process = ProcessLogs(LoggingConfig(folder=tmp_path / "logs"), "gateway")
    yield process
    process.close()
    for name in ("apar_core", "cluster", "deployments"):
        logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger(name).propagate = True


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("**/*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


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
    parts = (Piece(b'data: {"secret":"answer"}\n\n', num_tokens=4),) if streaming else ()
    start = AnswerStart(200, EVENTS if streaming else JSON, b"data: {}\n\n", num_tokens=5)
    http = client(FakeReplicas(start, *parts, end=END))

    await http.post(CHAT, json=BODY | {"stream": streaming}, headers={"x-request-id": "r1"})
    logs.close()

    (line,) = lines(tmp_path)
    assert line.pop("time").endswith("+00:00")
    times = [line.pop(name) for name in ("queue_s", "sent_s", "first_byte_s", "total_s")]
    assert times == sorted([0.0, *times])[1:]
    assert line == {
        "level": "INFO",
        "logger": "deployments.gateway.request_log",
        "event": "request",
        "request_id": "r1",
        "method": "POST",
        "path": CHAT,
        "key": "anonymous",
        "model": "m",
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
    }


async def test_a_request_that_was_refused_has_its_reason(logs: ProcessLogs, tmp_path: Path) -> None:
    http = client(FakeReplicas(AnswerStart(400, JSON, b'{"error":{"message":"a"}}')))

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


async def test_a_request_whose_client_left_is_logged_as_such(
    logs: ProcessLogs, tmp_path: Path
) -> None:
    replicas = FakeReplicas(AnswerStart(200, JSON, b"{}"))
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
        await client(FakeReplicas(AnswerStart(200, JSON, whole)), **settings).post(CHAT, json=BODY)
        await client(FakeReplicas(AnswerStart(200, EVENTS, streamed[0]), *parts), **settings).post(
            CHAT, json=BODY | {"stream": True}
        )
    logs.close()

    silent, also_silent, first, second = lines(tmp_path)
    assert "secret" not in json.dumps([silent, also_silent])
    assert first["prompt"] == second["prompt"] == BODY["messages"]
    assert first["answer"] == ["secret 1"]
    assert second["answer"] == ["secret 2", "x"]


async def test_a_prompt_with_a_lone_surrogate_is_logged_unchanged(
    logs: ProcessLogs, tmp_path: Path
) -> None:
    whole = AnswerStart(200, JSON, b'{"choices": [{"message": {"content": "half \\udc00"}}]}')
    http = client(FakeReplicas(whole), logging=LoggingConfig(content=True))
    body = b'{"model": "m", "messages": [{"role": "user", "content": "caf\u00e9 \\ud800 end"}]}'

    answer = await http.post(CHAT, content=body)
    logs.close()

    assert answer.status_code == 200
    (line,) = lines(tmp_path)
    assert line["prompt"] == [{"role": "user", "content": "caf\u00e9 \ud800 end"}]
    assert line["answer"] == ["half \udc00"]


def test_log_lines_carry_facts_and_exceptions(logs: ProcessLogs, tmp_path: Path) -> None:
    logger = logging.getLogger("deployments.some")
    logger.debug("left out")
    try:
        raise CapacityError("no room")
    except CapacityError:
        logger.exception("an event", extra={"file": Path("/x"), "count": 3})
    logs.close()

    (line,) = lines(tmp_path)
    assert (line["event"], line["level"], line["logger"]) == ("an event", "ERROR", logger.name)
    assert (line["file"], line["count"]) == ("/x", 3)
    assert "CapacityError: no room" in line["exception"]


class HangingDisk:
    """Blocks every write until it is mended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mended = threading.Event()
        emit = RotatingFileHandler.emit

        def wait_and_emit(handler: RotatingFileHandler, record: logging.LogRecord) -> None:
            assert self.mended.wait(60)
            emit(handler, record)

        monkeypatch.setattr(RotatingFileHandler, "emit", wait_and_emit)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    hanging = HangingDisk(monkeypatch)
    yield hanging
    hanging.mended.set()


async def test_while_the_disk_hangs_requests_go_on_and_a_bounded_number_of_lines_waits(
    disk: HangingDisk, logs: ProcessLogs, tmp_path: Path
) -> None:
    http = client(FakeReplicas(AnswerStart(200, JSON, b"{}")), logging=LoggingConfig(content=True))
    # 40 lines of a million characters; 32 of them may wait.
    body = {"model": "m", "prompt": "x" * 1_000_000}

    answers = [await http.post("/v1/completions", json=body) for _ in range(40)]
    num_dropped = logs.num_dropped
    disk.mended.set()
    logs.close()

    *written, last = lines(tmp_path)
    assert {answer.status_code for answer in answers} == {200}
    assert 0 < num_dropped < 10
    assert len(written) == 40 - num_dropped
    assert (last["level"], last["num_lines"]) == ("ERROR", num_dropped)
    assert last["event"] == "log lines dropped: the disk was too slow"


def test_a_disk_that_hangs_does_not_keep_a_process_from_ending(
    disk: HangingDisk, logs: ProcessLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.logs._CLOSE_S", 0.01)
    logging.getLogger("deployments.some").info("event")

    logs.close()

    assert not disk.mended.is_set()


def test_a_log_that_moves_off_a_disk_that_hangs_is_written(
    disk: HangingDisk, logs: ProcessLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.logs._CLOSE_S", 0.01)
    monkeypatch.setattr("cluster.logs._MAX_WAITING_CHARS", 5000)
    logger = logging.getLogger("deployments.some")
    for _ in range(9):
        logger.info("stuck")
    num_dropped = logs.num_dropped

    logs.configure(LoggingConfig(folder=tmp_path / "other"))
    logger.info("moved")

    assert logs.num_dropped == num_dropped > 0


def test_new_settings_move_the_log_without_losing_lines(logs: ProcessLogs, tmp_path: Path) -> None:
    logger = logging.getLogger("cluster.some")
    logger.info("first")
    logs.configure(LoggingConfig(folder=tmp_path / "other", level="WARNING"))
    logger.info("left out")
    logger.warning("second")
    logs.close()

    assert [line["event"] for line in lines(tmp_path / "logs")] == ["first"]
    assert [line["event"] for line in lines(tmp_path / "other")] == ["second"]


def test_full_files_are_rotated_and_a_bounded_number_is_kept(
    tmp_path: Path, logs: ProcessLogs
) -> None:
    config = LoggingConfig(folder=tmp_path / "small", max_file_mib=0.0005, keep_files=2)
    logs.configure(config)
    for number in range(100):
        logging.getLogger("deployments.some").info("event", extra={"number": number})
    logs.close()

    names = sorted(path.name.split(".", 1)[1] for path in (tmp_path / "small").iterdir())
    assert names == ["jsonl", "jsonl.1", "jsonl.2"]


def test_a_follower_copies_whole_lines_of_files_old_and_new(tmp_path: Path) -> None:
    output = io.StringIO()
    follower = LogFollower(tmp_path, output)
    first = tmp_path / "a.jsonl"
    follower.copy()
    with first.open("w") as file:
        file.write("one\ntw")
        file.flush()
        follower.copy()
        assert output.getvalue() == "one\n"
        file.write("o\nthree\n")
    first.rename(tmp_path / "a.jsonl.1")
    first.write_text("four\n")
    follower.copy()
    first.write_text("four\nfive\n")
    follower.copy()
    follower.close()

    assert output.getvalue() == "one\ntwo\nthree\nfour\nfive\n"


def test_logs_are_shown_only_if_they_would_go_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.logs.log_folder", lambda config: tmp_path)
    (tmp_path / "gateway-1.jsonl").write_text("a line\n")
    shown = {}
    for name, config in {
        "private": ClusterConfig(),
        "folder": ClusterConfig(logging=LoggingConfig(folder=tmp_path)),
        "own cluster": ClusterConfig(ray_address="auto"),
    }.items():
        output = io.StringIO()
        with shown_logs(config, output):
            pass
        shown[name] = output.getvalue()

    assert shown == {"private": "a line\n", "folder": "", "own cluster": ""}


def test_a_configured_folder_is_used_as_it_is(tmp_path: Path) -> None:
    assert log_folder(LoggingConfig(folder=tmp_path)) == tmp_path
