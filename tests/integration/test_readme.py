"""The README's programs, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def program(first_line: str) -> str:
    """The README's Python block that begins with this line."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    [found] = [block for block in blocks if block.startswith(first_line)]
    return str(found)


@pytest.mark.engine
def test_plain_vllm_forks_when_given_our_scheduler(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    # What follows is not in the README: the threads as the engine core saw them.
    script.write_text(
        program("from vllm import LLM, SamplingParams")
        + "    state = llm.llm_engine.engine_core.call_utility('apar_core_state')\n"
        + "    print(state['fork_counters']['forks'], state['threads'], sep='|')\n"
        + "    print(state['free_blocks'] == state['kv_blocks'])\n"
    )

    answer = subprocess.run(
        [sys.executable, script],
        cwd=ROOT,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr
    *text, counts, all_free = answer.stdout.strip().splitlines()
    num_forks, num_live = counts.split("|")
    assert int(num_forks) >= 2
    assert int(num_live) == 0
    assert all_free == "True"
    items = [line for line in text if re.match(r"\d+\. ", line)]
    assert len(items) >= 2
    assert "[Fork]" not in answer.stdout


def test_an_offline_decoder_answers_and_tells_of_every_pass(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(program("from apar_core.offline.decoders.interface import decode_answer"))

    answer = subprocess.run(
        [sys.executable, script],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.strip().splitlines()
    assert sum(bool(re.match(r"\d+\. ", line)) for line in lines) == 5
    assert [line.startswith("StepRecord(step=") for line in lines[-3:]] == [True] * 3
