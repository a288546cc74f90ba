"""Checkpoints that cannot fork, under the forking scheduler."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.errors import CheckpointError
from tests.integration.engine_process import EngineProcess
from tests.integration.random_checkpoint import write_checkpoint

pytestmark = pytest.mark.engine

PROMPTS = ["Give me 5 tips.", "What does [Fork] mean?", "Hi"]


def greedy(engine: OfflineEngine) -> tuple[list[tuple[str, tuple[int, ...]]], bool]:
    """Answers to PROMPTS, and whether any has a tree. Runs in the engine's process."""
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
    answers = engine.generate(PROMPTS, settings)
    has_tree = any(answer.record is not None for answer in answers)
    # Programs that this process starts choose for themselves where their engine core runs.
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    return [(answer.text, answer.token_ids) for answer in answers], has_tree


def run(
    directory: Path, **engine_args: Any
) -> tuple[list[tuple[str, tuple[int, ...]]], bool, list[str]]:
    """Return what `greedy` returns, and the warnings of the start."""
    engine = EngineProcess(model=str(directory), max_model_len=128, **engine_args)
    try:
        return *engine.call(greedy), engine.warnings
    finally:
        engine.close()


@pytest.mark.ci
def test_an_ordinary_checkpoint_is_served_as_vllm_serves_it(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)

    forking, has_tree, warnings = run(directory)
    stock, _, stock_warnings = run(directory, scheduler_cls=None)

    assert forking == stock
    assert not has_tree
    assert any("no control tokens" in warning for warning in warnings)
    assert not any("no control tokens" in warning for warning in stock_warnings)


def test_a_checkpoint_with_one_control_token_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, ("[Fork]",))
    added = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    assert "[Fork]" in added[-1]["content"]

    with pytest.raises(CheckpointError, match=r"'\[Fork\]'.*but not '\[Child\]'"):
        run(directory)
