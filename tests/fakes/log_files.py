"""Log files of a process, as tests write and read them."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployments.config.logging import LoggingConfig
from deployments.logs import ProcessLogs


@contextmanager
def process_logs(folder: Path) -> Iterator[ProcessLogs]:
    """Log to a folder; restores the loggers at the end."""
    process = ProcessLogs(LoggingConfig(folder=folder), "gateway")
    try:
        yield process
    finally:
        process.close()
        for name in ("apar_core", "cluster", "deployments"):
            logging.getLogger(name).setLevel(logging.NOTSET)
            logging.getLogger(name).propagate = True


def lines(folder: Path) -> list[dict[str, Any]]:
    """The log lines of all files below a folder."""
    files = sorted(folder.glob("**/*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
