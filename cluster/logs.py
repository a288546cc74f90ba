"""Sets the logs of a gateway's or a replica's process up: lines of JSON in files of its own."""

import atexit
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, TextIO

from cluster.config import ClusterConfig
from cluster.config.logging import LoggingConfig

PATTERN = "*.jsonl"
_SUBFOLDER = "apar"
_POLL_S = 0.2


def log_folder(config: LoggingConfig) -> Path:
    """The configured folder, or one beside Ray's own logs on the node of this process."""
    if config.folder is not None:
        return config.folder.expanduser().absolute()
    # Imported late: it reads its settings from the environment then.
    from ray.serve._private.logging_utils import get_serve_logs_dir

    return Path(get_serve_logs_dir()).parent / _SUBFOLDER


@contextmanager
def shown_logs(config: ClusterConfig, output: TextIO) -> Iterator[None]:
    """Copy to `output` what is logged, where no folder is configured and the cluster is private.

    Such a cluster's files go when it ends, and nobody would see them.
    """
    if config.logging.folder is not None or config.ray_address is not None:
        yield
        return
    follower = LogFollower(log_folder(config.logging), output)
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_POLL_S):
            follower.copy()
        follower.copy()

    executor = threading.Thread(target=follow, name="log-follower", daemon=True)
    executor.start()
    try:
        yield
    finally:
        ended.set()
        executor.join()
        follower.close()


class LogFollower:
    """Copies the whole lines that are added to the log files of a folder, also renamed ones."""

    def __init__(self, folder: Path, output: TextIO) -> None:
        self._folder = folder
        self._output = output
        # By inode: a file that is full is renamed, and a new one takes its name.
        self._files: dict[int, IO[bytes]] = {}
        self._cut: dict[int, bytes] = {}

    def copy(self) -> None:
        """Copy what has been added since the last time."""
        found = set()
        for path in sorted(self._folder.glob(PATTERN)):
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue  # It was renamed in this moment, and is followed under its inode.
            inode = os.fstat(file.fileno()).st_ino
            found.add(inode)
            if inode in self._files:
                file.close()
            else:
                self._files[inode] = file
        for inode in list(self._files):
            self._copy_lines(inode)
            if inode not in found:
                self._files.pop(inode).close()
                self._cut.pop(inode, None)
        self._output.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _copy_lines(self, inode: int) -> None:
        added = self._cut.pop(inode, b"") + self._files[inode].read()
        whole, newline, cut = added.rpartition(b"\n")
        self._output.write((whole + newline).decode(errors="replace"))
        if cut:
            self._cut[inode] = cut


# All code of ours; vLLM and Ray keep their own logs.
_LOGGERS = ("apar_core", "cluster", "deployments")
# Of all lines that wait for the disk, with what Python keeps of a record besides its line.
_MAX_WAITING_CHARS = 32 * 2**20
_RECORD_CHARS = 1024
# Seconds to wait for the last lines at exit.
_CLOSE_S = 5.0
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger and event, then the event's facts."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; a value that has no form in it, as its text."""
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {
            name: value
            for name, value in vars(record).items()
            # Ray adds names of its own with an underscore, vLLM with its name.
            if name not in _STANDARD and not name.startswith(("_", "vllm_"))
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """ISO 8601 in UTC, with milliseconds."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _Backlog:
    """The lines that wait for the disk, counted in characters; those beyond are left out."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._lock = threading.Lock()
        self._num_chars = 0
        self._num_told = 0

    def add(self, line: str) -> bool:
        """Count a waiting line and return whether it fits; a single line always does."""
        with self._lock:
            if self._num_chars and self._num_chars + _size(line) > _MAX_WAITING_CHARS:
                self.num_dropped += 1
                return False
            self._num_chars += _size(line)
            return True

    def written(self, line: str) -> int:
        """Stop counting a written line; once none waits, return how many were dropped."""
        with self._lock:
            self._num_chars -= _size(line)
            if self._num_chars:
                return 0
            num_new = self.num_dropped - self._num_told
            self._num_told = self.num_dropped
            return num_new


class _LineQueueHandler(QueueHandler):
    """Puts lines into the queue, without the objects that they were made of."""

    def __init__(self, queue: SimpleQueue[logging.LogRecord], backlog: _Backlog) -> None:
        super().__init__(queue)
        self.setFormatter(JsonFormatter())
        self._backlog = backlog

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """A record that holds the line alone."""
        return _line_record(record.levelno, self.format(record))

    def enqueue(self, record: logging.LogRecord) -> None:
        """Put a line into the queue, or count it where too much waits already."""
        if self._backlog.add(record.msg):
            super().enqueue(record)


class _LineWriter(QueueListener):
    """Writes the lines of the queue in a thread of its own."""

    def __init__(
        self, queue: SimpleQueue[logging.LogRecord], writer: logging.Handler, backlog: _Backlog
    ) -> None:
        super().__init__(queue, writer)
        self._backlog = backlog

    def handle(self, record: logging.LogRecord) -> None:
        """Write a line, and behind the last one that waits, how many were left out."""
        super().handle(record)
        if num_dropped := self._backlog.written(record.msg):
            facts = {"name": __name__, "levelname": "ERROR", "num_lines": num_dropped}
            lost = logging.makeLogRecord(facts | {"msg": "log lines left out: the disk hung"})
            super().handle(_line_record(logging.ERROR, JsonFormatter().format(lost)))

    def stop(self) -> None:
        """Write what waits, but wait no longer than `_CLOSE_S` for a disk that hangs."""
        self.enqueue_sentinel()
        thread: threading.Thread | None = self._thread
        if thread is not None:
            thread.join(_CLOSE_S)
            if not thread.is_alive():
                for handler in self.handlers:
                    handler.close()


def _line_record(level: int, line: str) -> logging.LogRecord:
    return logging.LogRecord(__name__, level, "", 0, line, None, None)


def _size(line: str) -> int:
    return len(line) + _RECORD_CHARS


class ProcessLogs:
    """The logs of one process, in `<folder>/<process>-<pid>.jsonl`.

    A thread writes them: a disk that hangs must not hold the event loop up. Lines that come
    meanwhile wait in memory, up to a bound; those beyond it are left out and counted.
    """

    def __init__(self, config: LoggingConfig, process: str) -> None:
        self._process = process
        # One for each folder that has been written to: lines that wait for a disk that hangs must
        # not fill the backlog of the next one.
        self._backlogs: list[_Backlog] = []
        self._listener: _LineWriter | None = self._start(config)
        atexit.register(self.close)

    @property
    def num_dropped(self) -> int:
        """Lines that were left out since the start, because the disk hung."""
        return sum(backlog.num_dropped for backlog in self._backlogs)

    def configure(self, config: LoggingConfig) -> None:
        """Take new settings; what is in the queue still goes where it should have gone."""
        old, self._listener = self._listener, self._start(config)
        if old is not None:
            old.stop()

    def close(self) -> None:
        """Write what is left in the queue, and log no more."""
        atexit.unregister(self.close)
        for name in _LOGGERS:
            logging.getLogger(name).handlers = []
        old, self._listener = self._listener, None
        if old is not None:
            old.stop()

    def _start(self, config: LoggingConfig) -> _LineWriter:
        folder = log_folder(config)
        folder.mkdir(parents=True, exist_ok=True)
        writer = RotatingFileHandler(
            folder / f"{self._process}-{os.getpid()}.jsonl",
            maxBytes=int(config.max_file_mib * 2**20),
            backupCount=config.keep_files,
            encoding="utf-8",
            # A lone surrogate, which JSON can carry, has no form in UTF-8; `\\ud800` is JSON again.
            errors="backslashreplace",
        )
        queue: SimpleQueue[logging.LogRecord] = SimpleQueue()
        backlog = _Backlog()
        self._backlogs.append(backlog)
        handler = _LineQueueHandler(queue, backlog)
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            logger.handlers = [handler]
            logger.setLevel(config.level)
            logger.propagate = False
        listener = _LineWriter(queue, writer, backlog)
        listener.start()
        return listener
