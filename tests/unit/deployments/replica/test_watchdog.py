"""The watchdog ends a replica whose engine is dead."""

import asyncio
import subprocess
import sys
import time

import psutil
import pytest

from deployments.replica.replica import EXIT_STATUS, watch


@pytest.mark.usefixtures("simulated_time")
async def test_the_process_ends_only_after_the_engine_is_dead() -> None:
    dead = False
    ended: list[int] = []
    said: list[list[int]] = []

    async def at_last() -> None:
        said.append([*ended])

    task = asyncio.create_task(
        watch(
            lambda: dead,
            end_process=ended.append,
            period_s=0.001,
            last_words_s=0.02,
            at_last=at_last,
        )
    )
    await asyncio.sleep(0.01)
    assert not task.done()

    dead = True
    await asyncio.sleep(0.01)
    assert ended == []  # Running streams can still send their error events.
    await task

    assert ended == [EXIT_STATUS]
    assert said == [[]]  # Once, before the end.


def test_a_stopped_engine_process_is_killed_with_its_replica() -> None:
    """A stopped process reacts only to SIGKILL, and would keep its GPU memory."""
    program = """
import os, signal, subprocess
from deployments.replica.replica import end_with_children
engine = subprocess.Popen(["sleep", "600"])
os.kill(engine.pid, signal.SIGSTOP)
print(engine.pid, flush=True)
end_with_children(70)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)

    assert done.returncode == EXIT_STATUS, done.stderr
    engine = int(done.stdout)
    deadline = time.monotonic() + 120
    # A killed process needs a moment to end, and cannot be waited for here.
    while is_running(engine):
        assert time.monotonic() < deadline, "the engine was not killed"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
