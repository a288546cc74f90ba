"""Log files: their lines, their rotation, and disks that hang."""

import io
import logging
import threading
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

import pytest

from apar_core.errors import CapacityError
from deployments.config import ClusterConfig
from deployments.config.logging import LoggingConfig
from deployments.logs import LogFollower, ProcessLogs, log_folder, shown_logs
from deployments.wire.response import ResponseStart
from tests.fakes.log_files import lines, process_logs
from tests.fakes.replicas import JSON, FakeReplicas, client
from tests.fakes.waiting import wait_until


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[ProcessLogs]:
    with process_logs(tmp_path / "logs") as process:
        yield process


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
    http = client(
        FakeReplicas(ResponseStart(200, JSON, b"{}")), logging=LoggingConfig(content=True)
    )
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


def test_a_burst_of_long_lines_is_written_at_once(
    logs: ProcessLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.logs._COLLECT_S", 600.0)
    monkeypatch.setattr("deployments.logs._LARGE_CHARS", 5000)
    for _ in range(3):
        logging.getLogger("deployments.some").info("x" * 2000)
    (file,) = (tmp_path / "logs").iterdir()

    wait_until(lambda: file.stat().st_size > 6000)


def test_lines_of_a_moment_are_written_together(
    logs: ProcessLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[str] = []
    monkeypatch.setattr(
        RotatingFileHandler, "emit", lambda _, record: batches.append(record.getMessage())
    )
    for number in range(50):
        logging.getLogger("deployments.some").info("event", extra={"number": number})
    logs.close()

    assert len(batches) < 10
    assert len("\n".join(batches).splitlines()) == 50


def test_a_disk_that_hangs_does_not_keep_a_process_from_ending(
    disk: HangingDisk, logs: ProcessLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.logs._CLOSE_S", 0.01)
    logging.getLogger("deployments.some").info("event")

    logs.close()

    assert not disk.mended.is_set()


def test_a_log_that_moves_off_a_disk_that_hangs_is_written(
    disk: HangingDisk, logs: ProcessLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.logs._CLOSE_S", 0.01)
    monkeypatch.setattr("deployments.logs._MAX_WAITING_CHARS", 5000)
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
    monkeypatch.setattr("deployments.logs.log_folder", lambda config: tmp_path)
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
