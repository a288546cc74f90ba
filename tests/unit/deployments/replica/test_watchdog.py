import asyncio
import subprocess
import sys
import time

import psutil

from deployments.replica.replica import EXIT_STATUS, watch


async def test_the_process_ends_once_the_engine_is_dead_and_not_before() -> None:
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
    assert ended == []  # the streams in flight hand on their error events
    await task

    assert ended == [EXIT_STATUS]
    assert said == [[]]  # before the end, once


def test_an_engine_that_stands_still_ends_with_its_replica() -> None:
    """A stopped process takes no signal but SIGKILL, and would keep its GPU's memory."""
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
    deadline = time.monotonic() + 10
    # A killed process takes a moment to end, and nobody may collect it here.
    while is_running(engine):
        assert time.monotonic() < deadline, "the engine was not killed"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
