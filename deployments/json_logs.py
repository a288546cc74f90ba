"""Sets the logs of a gateway's or a replica's process up: lines of JSON in files of its own."""

import atexit
import json
import logging
import os
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from queue import SimpleQueue
from typing import Any

from cluster.log_folder import log_folder
from cluster.logging_config import LoggingConfig

# All code of ours; vLLM and Ray keep their own logs.
_LOGGERS = ("apar_core", "cluster", "deployments")
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


class ProcessLogs:
    """The logs of one process, in `<folder>/<process>-<pid>.jsonl`.

    Writing is an executor's business: a disk that hangs must not hold the event loop up.
    """

    def __init__(self, config: LoggingConfig, process: str) -> None:
        self._process = process
        self._listener: QueueListener | None = self._start(config)
        atexit.register(self.close)

    def configure(self, config: LoggingConfig) -> None:
        """Take new settings; what is in the queue still goes where it should have gone."""
        old, self._listener = self._listener, self._start(config)
        _close(old)

    def close(self) -> None:
        """Write what is left in the queue, and log no more."""
        atexit.unregister(self.close)
        for name in _LOGGERS:
            logging.getLogger(name).handlers = []
        old, self._listener = self._listener, None
        _close(old)

    def _start(self, config: LoggingConfig) -> QueueListener:
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
        handler = QueueHandler(queue)
        handler.setFormatter(JsonFormatter())
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            logger.handlers = [handler]
            logger.setLevel(config.level)
            logger.propagate = False
        listener = QueueListener(queue, writer)
        listener.start()
        return listener


def _close(listener: QueueListener | None) -> None:
    if listener is None:
        return
    listener.stop()
    for handler in listener.handlers:
        handler.close()
