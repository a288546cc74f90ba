"""Logs of gateways and replicas: JSON lines in one file per process."""

import atexit
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, TextIO

from deployments.config import ClusterConfig
from deployments.config.logging import LoggingConfig
from deployments.private_files import own_folder

PATTERN = "*.jsonl"
_SUBFOLDER = "apar"
_POLL_S = 0.5


def log_folder(config: LoggingConfig) -> Path:
    """Return the configured folder, or one beside Ray's own logs on this node."""
    if config.folder is not None:
        return config.folder.expanduser().absolute()
    # Imported late: on import it reads its settings from the environment.
    from ray.serve._private.logging_utils import get_serve_logs_dir

    return Path(get_serve_logs_dir()).parent / _SUBFOLDER


@contextmanager
def shown_logs(config: ClusterConfig, output: TextIO) -> Iterator[None]:
    """Copy logs to `output` if no folder is configured and the cluster is private.

    The files of a private cluster are deleted with it.
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
    """Copies complete new lines of a folder's log files, also after rotation."""

    def __init__(self, folder: Path, output: TextIO) -> None:
        self._folder = folder
        self._output = output
        # By inode, because rotation renames files.
        self._files: dict[int, IO[bytes]] = {}
        self._cut: dict[int, bytes] = {}

    def copy(self) -> None:
        """Copy the lines added since the last call."""
        found = set()
        for path in sorted(self._folder.glob(PATTERN)):
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue  # Renamed just now; it is followed by its inode.
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


# Our own code; vLLM and Ray have their own logs.
_LOGGERS = ("apar_core", "cluster", "deployments")
# Limit on all lines that wait for the disk, including the overhead of a record.
_MAX_WAITING_CHARS = 32 * 2**20
_RECORD_CHARS = 1024
# Time to collect lines, and the largest batch (characters).
_COLLECT_S = 0.1
_BATCH_CHARS = 2**16
# Above this, waiting lines are not collected any longer.
_LARGE_CHARS = 2**20
# Time to wait for the last lines at exit.
_CLOSE_S = 5.0
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


_ENCODER = json.JSONEncoder(default=str, ensure_ascii=False)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, event and its `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON; values that JSON cannot express become text."""
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {
            name: value
            for name, value in vars(record).items()
            # Ray adds attributes with a leading underscore, vLLM with its own prefix.
            if name not in _STANDARD and not name.startswith(("_", "vllm_"))
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _ENCODER.encode(line)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """Return the time in ISO 8601, UTC, with milliseconds."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _Backlog:
    """Size of the lines that wait for the disk; lines over the limit are dropped.

    `is_large` is set while so much waits that it must be written at once.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self.is_large = threading.Event()
        self._lock = threading.Lock()
        self._num_chars = 0
        self._num_told = 0

    def add(self, line: str) -> bool:
        """Count a waiting line. Returns whether it fits; the only line always does."""
        with self._lock:
            if self._num_chars and self._num_chars + _size(line) > _MAX_WAITING_CHARS:
                self.num_dropped += 1
                return False
            self._num_chars += _size(line)
            if self._num_chars > _LARGE_CHARS:
                self.is_large.set()
            return True

    def written(self, lines: Sequence[str]) -> int:
        """Stop counting written lines. Returns the lines dropped, once none waits."""
        with self._lock:
            self._num_chars -= sum(map(_size, lines))
            if self._num_chars <= _LARGE_CHARS:
                self.is_large.clear()
            if self._num_chars:
                return 0
            num_new = self.num_dropped - self._num_told
            self._num_told = self.num_dropped
            return num_new


class _LineQueueHandler(logging.Handler):
    """Queues formatted lines, without the objects that records refer to."""

    def __init__(self, queue: SimpleQueue[str | None], backlog: _Backlog) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._queue = queue
        self._backlog = backlog

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or count it as dropped."""
        try:
            line = self.format(record)
            if self._backlog.add(line):
                self._queue.put(line)
        except Exception:  # noqa: BLE001  # As in `logging`: a bad record must not end a request.
            self.handleError(record)


class _LogFile(RotatingFileHandler):
    """A log file that only its owner and group can read: lines may contain prompts."""

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(self.baseFilename, flags, 0o640)
        return TextIOWrapper(os.fdopen(descriptor, "ab"), self.encoding, self.errors)


class _LineWriter:
    """Writes queued lines in batches, in an executor of its own.

    An executor that woke up for each line would take time from the event loop, which shares the
    interpreter's lock with it.
    """

    def __init__(
        self, queue: SimpleQueue[str | None], file: RotatingFileHandler, backlog: _Backlog
    ) -> None:
        self._queue = queue
        self._file = file
        self._backlog = backlog
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write the waiting lines, for at most `_CLOSE_S`."""
        self._queue.put(None)
        self._backlog.is_large.set()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._file.close()

    def _run(self) -> None:
        ended = False
        while not ended:
            lines = [self._queue.get()]
            self._backlog.is_large.wait(_COLLECT_S)
            while not self._queue.empty():
                lines.append(self._queue.get_nowait())
            ended = None in lines
            self._write([line for line in lines if line is not None])

    def _write(self, lines: Sequence[str]) -> None:
        """Write lines, and after the last waiting one the number of dropped lines."""
        # Files rotate between batches.
        most_chars = min(_BATCH_CHARS, self._file.maxBytes)
        batch: list[str] = []
        num_chars = 0
        for line in lines:
            if batch and num_chars + len(line) >= most_chars:
                self._write_batch(batch)
                batch, num_chars = [], 0
            batch.append(line)
            num_chars += len(line) + 1
        if batch:
            self._write_batch(batch)

    def _write_batch(self, batch: Sequence[str]) -> None:
        self._emit(logging.INFO, "\n".join(batch))
        if num_dropped := self._backlog.written(batch):
            self._emit(logging.ERROR, _loss(num_dropped))

    def _emit(self, level: int, text: str) -> None:
        self._file.handle(logging.LogRecord(__name__, level, "", 0, text, None, None))


def _loss(num_lines: int) -> str:
    facts: dict[str, Any] = {"name": __name__, "levelname": "ERROR", "num_lines": num_lines}
    event = "log lines dropped: the disk was too slow"
    return JsonFormatter().format(logging.makeLogRecord(facts | {"msg": event}))


def _size(line: str) -> int:
    return len(line) + _RECORD_CHARS


class ProcessLogs:
    """The logs of one process, in `<folder>/<process>-<pid>.jsonl`.

    An executor writes them, so that a slow disk does not block the event loop. Lines wait in
    memory up to a limit; further ones are dropped and counted.
    """

    def __init__(self, config: LoggingConfig, process: str) -> None:
        self._process = process
        # One per folder: lines that wait for a slow disk must not fill the next folder's backlog.
        self._backlogs: list[_Backlog] = []
        self._writer: _LineWriter | None = self._start(config)
        atexit.register(self.close)

    @property
    def num_dropped(self) -> int:
        """Lines dropped since the start."""
        return sum(backlog.num_dropped for backlog in self._backlogs)

    def configure(self, config: LoggingConfig) -> None:
        """Apply new settings; lines in the queue still go to the old folder."""
        old, self._writer = self._writer, self._start(config)
        if old is not None:
            old.stop()

    def close(self) -> None:
        """Write the rest of the queue and stop logging."""
        atexit.unregister(self.close)
        for name in _LOGGERS:
            logging.getLogger(name).handlers = []
        old, self._writer = self._writer, None
        if old is not None:
            old.stop()

    def _start(self, config: LoggingConfig) -> _LineWriter:
        folder = log_folder(config)
        if config.folder is None:
            own_folder(folder)
        else:
            # Its owner decides who may access a folder that exists.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _LogFile(
            folder / f"{self._process}-{os.getpid()}.jsonl",
            maxBytes=int(config.max_file_mib * 2**20),
            backupCount=config.keep_files,
            encoding="utf-8",
            # A lone surrogate is valid in JSON but not in UTF-8; `\\ud800` is valid JSON again.
            errors="backslashreplace",
        )
        queue: SimpleQueue[str | None] = SimpleQueue()
        backlog = _Backlog()
        self._backlogs.append(backlog)
        handler = _LineQueueHandler(queue, backlog)
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            logger.handlers = [handler]
            logger.setLevel(config.level)
            logger.propagate = False
        return _LineWriter(queue, file, backlog)
