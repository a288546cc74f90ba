"""Tasks in worker processes, which end with the process that started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.lab.grid import grid

PROGRAM = """
import os, time

from cluster.lab.grid import worker_pool

if __name__ == "__main__":
    with worker_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(60)
"""
WAIT_S = 120


def is_alive(pid: int) -> bool:
    try:
        # A process that has ended but was not waited for counts as ended.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_alive(worker)
        os.kill(parent.pid, signal.SIGKILL)

    deadline_s = time.monotonic() + WAIT_S
    while is_alive(worker) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_alive(worker)


class Divider:
    """Divides a number by others."""

    def __init__(self, number: int) -> None:
        self._number = number

    def run(self, by: int) -> tuple[int, int]:
        return self._number // by, os.getpid()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("workers", [1, 2])
def test_each_task_comes_with_its_result(workers: int) -> None:
    with grid(workers, Divider, 60) as run_all:
        found = {by: result for (by,), result in run_all([(1,), (2,), (3,)])}

    assert {by: quotient for by, (quotient, _) in found.items()} == {1: 60, 2: 30, 3: 20}
    assert (os.getpid() in {pid for _, pid in found.values()}) == (workers == 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_task_reaches_the_caller(workers: int) -> None:
    with pytest.raises(ZeroDivisionError), grid(workers, Divider, 60) as run_all:
        list(run_all([(1,), (0,)]))
