"""Worker processes for runs in virtual time."""

from __future__ import annotations

import os
import threading
from multiprocessing import parent_process


def prepare_worker() -> None:
    """Set up a spawned worker process: quiet, on one thread, and ended with its parent.

    Errors reach the parent as exceptions of futures, so nothing is lost with standard error.
    """
    # vLLM and Triton write to standard error at import and exit, over the progress bar.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A parent that is killed does not end its pool.
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
