"""Stages of a start, as vLLM's log tells them."""

import logging
from pathlib import Path

import pytest

from apar_core.engine.start_stages import (
    STAGES_FILE,
    Stage,
    describe_error,
    first_failure,
    latest_stage,
    note,
    watch_stages,
)


def test_vllms_log_tells_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "stages"
    monkeypatch.setenv(STAGES_FILE, str(file))
    logger = logging.getLogger("vllm")
    before = list(logger.handlers)
    monkeypatch.setattr(logger, "level", logging.INFO)
    try:
        watch_stages()
        watch_stages()
        worker = logging.getLogger("vllm.v1.worker.some_model_runner")
        assert latest_stage(file) is None
        worker.info("Starting to load model %s...", "m")
        assert latest_stage(file) is Stage.LOADING_WEIGHTS
        worker.info("Loading weights took %.2f seconds", 3.0)
        assert latest_stage(file) is Stage.COMPILING
        # Another worker of the same engine is slower; the engine is where its first one is.
        worker.info("Starting to load model %s...", "m")
        assert latest_stage(file) is Stage.COMPILING
        assert len(file.read_text().split()) == 3
    finally:
        logger.handlers = before


def test_nothing_is_watched_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STAGES_FILE, raising=False)
    before = list(logging.getLogger("vllm").handlers)

    watch_stages()

    assert logging.getLogger("vllm").handlers == before


def test_a_file_that_is_gone_is_left_alone(tmp_path: Path) -> None:
    note(tmp_path / "none" / "stages", Stage.COMPILING)

    assert latest_stage(tmp_path / "none" / "stages") is None


def test_the_first_error_of_the_engines_processes_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stages"
    monkeypatch.setenv(STAGES_FILE, str(file))
    logger = logging.getLogger("vllm")
    before = list(logger.handlers)
    try:
        watch_stages()
        assert first_failure(file) is None
        for process, error in (("WorkerProc", ValueError("too small")), ("EngineCore", OSError())):
            try:
                raise error
            except (ValueError, OSError):
                logging.getLogger("vllm.v1.engine.core").exception("%s failed to start.", process)
        assert first_failure(file) == "ValueError: too small"
    finally:
        logger.handlers = before


def test_an_error_without_a_message_is_described_by_its_line() -> None:
    try:
        raise AssertionError
    except AssertionError as error:
        described = describe_error(error)

    assert described.startswith("AssertionError: ")
    assert described.endswith(": raise AssertionError")
