"""Run `apar generate` as a user does: in a process of its own, with a real engine.

`tests/integration/test_readme.py` runs it with `--show-threads`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app

APAR = Path(sys.executable).with_name("apar")
LIST_PROMPT = "Give me 5 tips for learning guitar."

pytestmark = pytest.mark.engine


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [APAR, "generate", *arguments], capture_output=True, text=True, timeout=180, check=False
    )


@pytest.mark.slow
def test_without_forking_the_text_is_all_that_is_printed() -> None:
    answer = generate(LIST_PROMPT, "--no-fork", "--max-tokens", "12")

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    assert "root" not in answer.stdout
    assert "[Fork]" not in answer.stdout


def test_a_model_that_is_not_there_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["generate", "Hello", "--model", str(tmp_path)])

    assert answer.exit_code == 1
    assert f"Error: {tmp_path}: " in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.slow
def test_threads_that_wait_are_shown_with_their_steps_and_joins() -> None:
    answer = generate(LIST_PROMPT, "--model", "apar-tiny-threadweaver", "--show-threads")

    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.strip().splitlines()
    root = next(line for line in lines if line.startswith("root  "))
    assert re.search(r"steps 1-\d+, \d+-\d+$", root)
    threads = [line for line in lines if line.startswith("├── root.")]
    assert len(threads) == 5
    # All of them begin in the same step and close themselves.
    assert len({re.search(r"steps (\d+)-\d+$", line)[1] for line in threads}) == 1  # type: ignore[index]
    assert lines[-1].startswith("6 threads, 1 joins, ")
