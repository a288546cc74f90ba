"""The programs of the guide to offline batches, and Ray Data's rows after the loss of a replica."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from apar_core.engine.answer_tree import AnswerTree
from cluster.local_ray import free_port
from tests.fakes.quick_start import ROOT, blocks, program
from tests.integration.ray_data_batch import NUM_QUESTIONS

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


def run(command: list[str]) -> str:
    """Run a program in the repository's root to its end; return what it printed."""
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-8000:]
    return finished.stdout


def test_every_block_of_the_guide_is_known() -> None:
    """Programs and the batch file are run below; `cluster` runs the last command."""
    begins = [block.split("\n", 1)[0] for block in blocks("python", GUIDE)]
    assert begins == ["from vllm import LLM, SamplingParams", "import ray"]
    assert [block.split(maxsplit=1)[0] for block in blocks("bash", GUIDE)] == ["cat", "pip", "ray"]


@pytest.mark.ci
def test_the_guides_program_prints_trees(tmp_path: Path) -> None:
    script = tmp_path / "batch.py"
    script.write_text(program("from vllm import LLM", GUIDE))

    printed = run([sys.executable, str(script)])

    assert printed.count("\nroot None None -") >= 2, printed
    assert re.search(r"^root\.0 root \d+ -\d", printed, re.MULTILINE), printed
    # The engine's log, which names the control tokens, begins each line with its process.
    answers = [line for line in printed.splitlines() if not line.startswith("(")]
    assert not CONTROL.search("\n".join(answers))


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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[psutil.Process]:
    """Ray as the guide starts it, but on a port of its own; yields the parent of its processes."""
    pytest.importorskip("pyarrow", reason='Ray Data is not installed: pip install "ray[data]"')
    port = free_port()
    log = tmp_path_factory.mktemp("ray") / "log"
    # Ray's socket paths have at most 107 characters.
    with TemporaryDirectory(prefix="apar-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "tests.integration.ray_head"]
        command += ["--num-cpus", "8", "--port", str(port), "--node-ip-address", "127.0.0.1"]
        command += ["--include-dashboard", "false", "--temp-dir", folder]
        command += ["--ray-client-server-port", str(free_port())]
        with log.open("wb") as output:
            head = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        wait_for(lambda: b"Ray runtime started" in log.read_bytes(), head, log)
        process = psutil.Process(head.pid)
        started = [process]
        os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        try:
            yield process
        finally:
            del os.environ["RAY_ADDRESS"]
            started += process.children(recursive=True)
            head.terminate()
            _, alive = psutil.wait_procs(started, timeout=60)
            for each in alive:
                each.kill()


def test_the_guides_ray_data_program_writes_restored_answers(
    cluster: psutil.Process, tmp_path: Path
) -> None:
    script = tmp_path / "batch.py"
    program_text = program("import ray", GUIDE)
    written = tmp_path / "answers"
    script.write_text(program_text.replace('"answers"', repr(str(written))))

    run([sys.executable, str(script)])

    rows = [
        json.loads(line)
        for file in written.glob("*.json")
        for line in file.read_text().splitlines()
    ]
    check_rows(rows, 40)


@pytest.mark.parametrize("victim", ["vLLMEngineStageUDF", "VLLM::EngineCore"])
def test_ray_data_loses_no_row_when_a_process_of_a_replica_is_killed(
    cluster: psutil.Process, tmp_path: Path, victim: str
) -> None:
    """The replica's actor, or its engine core, which is a process of its own."""
    out, log = tmp_path / "rows.jsonl", tmp_path / "log"
    out.touch()
    with log.open("wb") as output:
        batch = subprocess.Popen(
            [*BATCH, "--rows", str(ROWS), "--out", str(out)],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        found: list[psutil.Process] = []

        def both_replicas_run() -> bool:
            found[:] = processes_called(victim, cluster)
            return len(found) == 2 and len(lines_of(out)) >= ROWS // 8

        wait_for(both_replicas_run, batch, log)
        os.kill(found[0].pid, signal.SIGKILL)
        num_at_kill = len(lines_of(out))
        assert batch.wait(PATIENCE_S) == 0, log.read_text(errors="replace")
    finally:
        batch.kill()
        batch.wait()

    assert num_at_kill < ROWS
    rows = [json.loads(line) for line in lines_of(out)]
    check_rows(rows, ROWS)
    # Greedy answers are the same again after a kill.
    assert {row["tree"]["finish_reason"] for row in rows} == {"stop"}
    assert len({(row["id"] % NUM_QUESTIONS, row["text"]) for row in rows}) == NUM_QUESTIONS
    # The killed replica's other processes ended with it, and the others with the run.
    wait_for(lambda: not processes_called("VLLM::", cluster), None, log)


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


def processes_called(name: str, cluster: psutil.Process) -> list[psutil.Process]:
    """Return the processes of a Ray cluster with this in their names."""
    return [each for each in cluster.children(recursive=True) if name in command_of(each)]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_for(
    condition: Callable[[], bool], batch: subprocess.Popen[bytes] | None, log: Path
) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert batch is None or batch.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.2)
