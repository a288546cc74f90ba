"""The commands and programs of the quick-start pages, run as they are written.

Those that need a running server are in `tests/integration/serving/test_quick_start.py`.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from apar_core.models.smollm2 import APAR_SMOLLM2
from tests.fakes.quick_start import ROOT, blocks, commands, program

NOT_RUN = {
    "make": "a target is only looked up, by `make --dry-run`",
    "curl": "tests/integration/serving/test_quick_start.py",
    "pip install": ".ci/test-wheel installs the wheel; .ci/resolve resolves every extra",
    "uv pip install": ".ci/resolve resolves every extra",
    "vllm serve": "needs a GPU; tests/integration/test_vllm_server.py starts the same server",
    ".venv-gpu/bin/apar": "needs a GPU and the hub",
    "docker": "there is no container daemon",
}
RUN = [line for line in commands() if not line.startswith(tuple(NOT_RUN))]
PROGRAMS = ("from vllm import LLM", "from openai import OpenAI")


def test_every_block_of_the_quick_start_is_run_or_has_a_reason() -> None:
    assert all(line.startswith((".venv/bin/apar ", "apar ")) for line in RUN), RUN
    assert len(RUN) >= 2
    assert all(block.startswith(PROGRAMS) for block in blocks("python"))


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make ")])
def test_a_make_target_exists(line: str) -> None:
    subprocess.run(
        [*shlex.split(line), "--dry-run"], cwd=ROOT, check=True, capture_output=True, timeout=300
    )


@pytest.mark.engine
@pytest.mark.ci
@pytest.mark.parametrize("line", RUN)
def test_a_command_of_the_quick_start_succeeds(line: str) -> None:
    apar, *arguments = shlex.split(line)
    assert apar.endswith("apar")
    if "apar-smollm2" in line and not APAR_SMOLLM2.folder.is_dir():
        pytest.skip("`apar fetch` was not run")

    answer = subprocess.run(
        [Path(sys.executable).with_name("apar"), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert answer.returncode == 0, answer.stdout + answer.stderr
    if "--show-threads" in arguments:
        lines = answer.stdout.strip().splitlines()
        assert lines[0].startswith("root  ")
        threads = [line for line in lines if re.match(r"[│ ]*[├└]── root\.", line)]
        assert len(threads) >= 2
        saved = rf"{len(threads) + 1} threads, \d+ tokens in \d+ steps instead of \d+"
        assert re.search(saved, lines[-1])
        if "--temperature 0" in line:
            printed = "\n".join(line.rstrip() for line in lines)
            assert printed in [block.strip() for block in blocks("text")]


@pytest.mark.ci
@pytest.mark.engine
def test_plain_vllm_forks_when_given_our_scheduler(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    # What follows is not in the documentation: the threads as the engine core saw them.
    script.write_text(
        program("from vllm import LLM, SamplingParams")
        + "    state = llm.llm_engine.engine_core.call_utility('apar_core_state')\n"
        + "    print(state['fork_counters']['forks'], state['threads'], sep='|')\n"
        + "    print(state['free_blocks'] == state['kv_blocks'])\n"
    )

    answer = subprocess.run(
        [sys.executable, script],
        cwd=ROOT,
        env={
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        },
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


@pytest.mark.ci
def test_an_offline_decoder_answers_and_records_every_pass(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        program(
            "from apar_core.offline.decoders.interface import decode_answer", ("docs/decoders.md",)
        )
    )

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
