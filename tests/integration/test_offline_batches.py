"""The programs of the guide to offline batches, and Ray Data's rows after the loss of a replica."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from apar_core.engine.answer_tree import AnswerTree
from tests.fakes.quick_start import ROOT, blocks, program

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]

GUIDE = ("docs/offline-batches.md",)
PATIENCE_S = 1800.0
ROWS = int(os.environ.get("APAR_BATCH_ROWS", "96"))
"""Rows of the run in which a process is killed; 1,000 for the acceptance of a release."""
BATCH = [sys.executable, "-m", "tests.integration.ray_data_batch"]
CONTROL = re.compile(r"\[(Fork|Child)\]")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A Ray cluster of the test's own, without a token in the user's home.
    "RAY_AUTH_MODE": "disabled",
    # Replicas of other tests take memory, too.
    "RAY_memory_monitor_refresh_ms": "0",
    # By default Ray's workers, and so the engines, run at a lower priority.
    "RAY_worker_niceness": "0",
    # Sampling with log-probabilities would be compiled in each replica.
    "TORCH_COMPILE_DISABLE": "1",
}


def run(command: list[str], folder: Path = ROOT, **variables: str) -> str:
    """Run a program to its end; return what it printed."""
    finished = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-8000:]
    return finished.stdout


def test_every_block_of_the_guide_is_run() -> None:
    begins = [block.split("\n", 1)[0] for block in blocks("python", GUIDE)]
    assert begins == ["from vllm import LLM, SamplingParams", "import ray"]
    assert [block.split(maxsplit=1)[0] for block in blocks("bash", GUIDE)] == ["cat", "pip"]


@pytest.mark.ci
def test_the_guides_program_prints_trees(tmp_path: Path) -> None:
    script = tmp_path / "batch.py"
    script.write_text(program("from vllm import LLM", GUIDE))

    printed = run([sys.executable, str(script)])

    assert printed.count("\nroot None None -") >= 2, printed
    assert re.search(r"^root\.0 root \d+ -\d", printed, re.MULTILINE), printed
    assert not CONTROL.search(printed)


def test_run_batch_answers_the_guides_file(tmp_path: Path) -> None:
    [block] = [each for each in blocks("bash", GUIDE) if "vllm run-batch" in each]
    # The CPU wheel on PyPI has no such command.
    module = f"{sys.executable} -m vllm.entrypoints.launchers.run_batch"
    script = block.replace("vllm run-batch", module)
    names = ("batch.jsonl", "answers.jsonl")
    for name in names:
        script = script.replace(name, str(tmp_path / name))

    run(["bash", "-ec", script])

    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    answers = {line["custom_id"]: line for line in lines}
    assert answers.keys() == {"1", "2"}
    assert [line["error"] for line in lines] == [None, None]
    forked, unforked = (
        answers[name]["response"]["body"]["choices"][0]["message"]["content"] for name in "12"
    )
    assert forked.startswith("1.") or "\n1." in forked, forked
    assert not CONTROL.search(forked + unforked)
    # With its fork token banned, the small model ends a list early.
    assert forked != unforked


def test_the_guides_ray_data_program_writes_restored_answers(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason='Ray Data is not installed: pip install "ray[data]"')
    script = tmp_path / "batch.py"
    program_text = program("import ray", GUIDE)
    written = tmp_path / "answers"
    script.write_text(program_text.replace('"answers"', repr(str(written))))

    with short_folder() as folder:
        printed = run([sys.executable, str(script)], RAY_TMPDIR=folder)

    rows = [
        json.loads(line)
        for file in written.glob("*.json")
        for line in file.read_text().splitlines()
    ]
    check_rows(rows, 40)
    assert not CONTROL.search(printed)


@pytest.mark.parametrize("victim", ["vLLMEngineStageUDF", "VLLM::EngineCore"])
def test_ray_data_loses_no_row_when_a_process_of_a_replica_is_killed(
    tmp_path: Path, victim: str
) -> None:
    """The replica's actor, or its engine core, which is a process of its own."""
    pytest.importorskip("pyarrow", reason='Ray Data is not installed: pip install "ray[data]"')
    out = tmp_path / "rows.jsonl"
    out.touch()
    with short_folder() as folder, (tmp_path / "log").open("wb") as log:
        batch = subprocess.Popen(
            [*BATCH, "--rows", str(ROWS), "--out", str(out)],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "RAY_TMPDIR": folder},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        descendants: list[psutil.Process] = []
        try:
            wait_for(lambda: len(lines_of(out)) >= ROWS // 4, batch, tmp_path / "log")
            descendants = psutil.Process(batch.pid).children(recursive=True)
            found = [each for each in descendants if is_called(each, victim)]
            assert len(found) == 2, [name_of(each) for each in descendants]
            os.kill(found[0].pid, signal.SIGKILL)
            num_at_kill = len(lines_of(out))
            assert batch.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text(errors="replace")
        finally:
            batch.kill()
            batch.wait()
            _, alive = psutil.wait_procs(descendants, timeout=60)
            for each in alive:
                each.kill()

    assert num_at_kill < ROWS
    assert [each for each in alive if each.is_running()] == []
    check_rows([json.loads(line) for line in lines_of(out)], ROWS)


def check_rows(rows: list[dict[str, Any]], number: int) -> None:
    """Check that every row came back once, with its restored text and its tree."""
    assert sorted(row["id"] for row in rows) == list(range(number))
    num_forked = 0
    for row in rows:
        tree = AnswerTree.from_plain(row["tree"])
        assert row["text"] == tree.text != ""
        assert not CONTROL.search(row["text"])
        for thread in tree.threads:
            assert thread.logprobs is None or len(thread.logprobs) == len(thread.token_ids)
        num_forked += len(tree.threads) > 1
    assert num_forked > number / 2


def lines_of(file: Path) -> list[str]:
    """Return the complete lines of a file that is being written."""
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_called(process: psutil.Process, name: str) -> bool:
    return name in name_of(process)


def wait_for(condition: Callable[[], bool], batch: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert batch.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.2)


@contextmanager
def short_folder() -> Iterator[str]:
    """Yield a folder for Ray, whose socket paths have at most 107 characters."""
    with TemporaryDirectory(prefix="apar-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder
