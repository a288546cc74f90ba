"""Stages of a starting engine: loading weights, compiling, warming up; and why it failed.

vLLM tells it only in its log, in several processes. A handler in each of them writes the stage to a
file that `STAGES_FILE` names, and the process that waits for the engine reads it. The first error
with an exception is written to a file beside it.
"""

import logging
import os
import traceback
from enum import StrEnum
from pathlib import Path

STAGES_FILE = "APAR_STAGES_FILE"
"""Environment variable with the path of the file; without it nothing is watched."""


class Stage(StrEnum):
    """Stages in their order, in words that fit after "it is"."""

    IMPORTING = "importing vLLM"
    STARTING_ENGINE = "starting the engine's process"
    LOADING_WEIGHTS = "loading weights"
    COMPILING = "compiling and sizing the KV cache"
    WARMING_UP = "answering its warm-up requests"


_ORDER = list(Stage)
_BEGINNINGS = {
    "Starting to load model": Stage.LOADING_WEIGHTS,
    "Loading weights took": Stage.COMPILING,
    "Model loading took": Stage.COMPILING,
    "Warming up model for the compilation": Stage.COMPILING,
}


class _StageHandler(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__(logging.INFO)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR and record.exc_info and record.exc_info[1]:
            note_failure(self._file, record.exc_info[1])
        # The template: formatting every line of vLLM's log would be wasted.
        for beginning, stage in _BEGINNINGS.items():
            if str(record.msg).startswith(beginning):
                note(self._file, stage)


def watch_stages() -> None:
    """Write the stages that this process logs, if a file for them is named."""
    path = os.environ.get(STAGES_FILE)
    logger = logging.getLogger("vllm")
    if path and not any(isinstance(handler, _StageHandler) for handler in logger.handlers):
        logger.addHandler(_StageHandler(Path(path)))


def note(file: Path, stage: Stage) -> None:
    """Note that a stage has begun; a file that cannot be written is left alone."""
    try:
        with file.open("a") as lines:
            lines.write(f"{stage.name}\n")
    except OSError:
        logging.getLogger(__name__).debug("stage not noted", exc_info=True)


def note_failure(file: Path, error: BaseException) -> None:
    """Note why a process of the engine failed; those that fail after it are left out.

    When a worker fails, the engine core fails too, with an error that only refers to it.
    """
    try:
        with _failure_file(file).open("x", encoding="utf-8") as failure:
            failure.write(describe_error(error))
    except OSError:
        logging.getLogger(__name__).debug("failure not noted", exc_info=True)


def first_failure(file: Path) -> str | None:
    """Return the first error of a process of the engine, None if none has reported one."""
    try:
        return _failure_file(file).read_text(encoding="utf-8") or None
    except OSError:
        return None


def _failure_file(file: Path) -> Path:
    return file.with_name(f"{file.name}-failure")


def describe_error(error: BaseException) -> str:
    """Return an exception's class and message; without a message, the line that raised it.

    Of several invalid values, only the first is described.
    """
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if not field:
            return message
        got = f" (got {first['input']!r})" if isinstance(first["input"], str | float) else ""
        return f"{field}: {message}{got}"
    message = str(error).strip()
    if not message:
        frames = traceback.extract_tb(error.__traceback__)
        message = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}: {message}"


def latest_stage(file: Path) -> Stage | None:
    """Return the last stage that has begun in any process, None before the first."""
    try:
        names = file.read_text().split()
    except OSError:
        return None
    known = [Stage[name] for name in names if name in Stage.__members__]
    return max(known, key=_ORDER.index, default=None)
