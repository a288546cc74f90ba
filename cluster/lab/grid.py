"""Worker processes for a grid of tasks, such as runs in virtual time.

A worker is a function of a task, or an object with the methods `run(*task)` and `close()`. Each
process creates one and keeps it, because an engine or recorded data takes seconds to load.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager, nullcontext
from multiprocessing import get_context, parent_process
from typing import Any


@contextmanager
def worker_pool(
    workers: int, start: Callable[..., object] | None = None, *start_args: Any
) -> Iterator[ProcessPoolExecutor]:
    """Provide a pool of processes, each of which calls `start` once, before its first task.

    The processes discard standard error, use one OpenMP thread, and exit with their parent. An
    exception or Ctrl-C in the `with` block cancels the tasks that have not started. An exception in
    a task is raised by the task's future.
    """
    # Spawn: a fork of a multi-threaded process may wait for a lock forever.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _prepare, (start, start_args))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


Grid = Callable[[Sequence[tuple[Any, ...]]], Iterator[tuple[tuple[Any, ...], Any]]]
"""Runs tasks and yields (task, result) pairs as they complete."""


@contextmanager
def grid(workers: int, make: Callable[..., Any], *args: Any) -> Iterator[Grid]:
    """Provide a grid of `workers` processes, each with a worker `make(*args)`.

    With one worker, tasks run in this process; otherwise arguments, tasks and results are pickled.
    An exception in a task ends the grid, as in `worker_pool`.
    """
    if workers == 1:
        worker = make(*args)
        run_one = getattr(worker, "run", worker)
        with closing(worker) if hasattr(worker, "close") else nullcontext():
            yield lambda tasks: ((task, run_one(*task)) for task in tasks)
        return
    with worker_pool(workers, _make_worker, make, args) as pool:

        def run(tasks: Sequence[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], Any]]:
            futures = {pool.submit(_run, task): task for task in tasks}
            for future in as_completed(list(futures)):
                # Results may be large, so none is kept.
                yield futures.pop(future), future.result()

        yield run


_worker: Any = None
"""The worker of this pool process."""


def _make_worker(make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _worker
    _worker = make(*args)


def _run(task: tuple[Any, ...]) -> Any:
    return getattr(_worker, "run", _worker)(*task)


def _prepare(start: Callable[..., object] | None, start_args: tuple[Any, ...]) -> None:
    # vLLM and Triton write to standard error at import and exit, over the progress bar.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start(*start_args)


def _end_with_parent() -> None:
    # A killed parent does not shut its pool down.
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
