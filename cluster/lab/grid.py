"""Tasks in several processes: a grid of runs in virtual time.

A worker is an object with a method `run(*task)`. Each process makes one and keeps it, because an
engine or recorded data take seconds to load.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from multiprocessing import get_context, parent_process
from typing import Any, Protocol


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


class Worker(Protocol):
    """Does tasks; made once in each process."""

    def run(self, *task: Any) -> Any:
        """Do a task."""

    def close(self) -> None:
        """Free what the worker holds, at the end of a run in this process."""


Grid = Callable[[Sequence[tuple[Any, ...]]], Iterator[tuple[tuple[Any, ...], Any]]]
"""Does tasks, and yields each with its result as it ends."""


@contextmanager
def grid(workers: int, make: Callable[..., Worker], *args: Any) -> Iterator[Grid]:
    """Provide a grid whose workers are `make(*args)`: so many processes, or this one for 1.

    Arguments, tasks and results are pickled. An error of a task ends the grid, as in `worker_pool`.
    """
    if workers == 1:
        with closing(make(*args)) as worker:
            yield lambda tasks: ((task, worker.run(*task)) for task in tasks)
        return
    with worker_pool(workers, _make_worker, make, args) as pool:

        def run(tasks: Sequence[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], Any]]:
            futures = {pool.submit(_run, task): task for task in tasks}
            for future in as_completed(futures):
                yield futures[future], future.result()

        yield run


_worker: Worker | None = None
"""The worker of a pool's process."""


def _make_worker(make: Callable[..., Worker], args: tuple[Any, ...]) -> None:
    global _worker
    _worker = make(*args)


def _run(task: tuple[Any, ...]) -> Any:
    assert _worker is not None
    return _worker.run(*task)


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
