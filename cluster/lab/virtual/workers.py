"""Worker processes for runs in virtual time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any


@contextmanager
def worker_pool(
    workers: int, start: Callable[..., object] | None = None, *start_args: Any
) -> Iterator[ProcessPoolExecutor]:
    """Provide a pool of processes, each of which calls `start` once, before its first task.

    The processes are quiet, run on one thread, and end with their parent. An error or Ctrl-C in the
    `with` block cancels the tasks that have not begun. An error of a task reaches the caller with
    the task's future.
    """
    # Spawned: a forked copy of a process with threads may wait for a lock forever.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _prepare, (start, start_args))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _prepare(start: Callable[..., object] | None, start_args: tuple[Any, ...]) -> None:
    # vLLM and Triton write to standard error at import and exit, over the progress bar.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start(*start_args)


def _end_with_parent() -> None:
    # A parent that is killed does not end its pool.
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
