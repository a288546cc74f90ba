"""The running application as the tests see it: real Ray, real vLLM, the embedded model."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

MAX_CONCURRENCY = 224
MAX_QUEUED = 16


@dataclass(frozen=True)
class RunningApplication:
    """Where it listens, and a look inside."""

    url: str
    model: str
    load: Callable[[], dict[str, Any]]

    def wait_until_idle(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """The load once nothing is left of any request; fails when something stays."""
        deadline = time.monotonic() + timeout_s
        while True:
            load = self.load()
            if not (load["requests_inside"] or load["threads"]):
                assert load["free_blocks"] == load["kv_blocks"], load
                return load
            assert time.monotonic() < deadline, f"still busy: {load}"
            time.sleep(0.1)


def processes(title: str) -> list[psutil.Process]:
    """Our living descendants whose command line begins with `title`."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # A zombie counts as one that is gone.
            if " ".join(child.cmdline()).startswith(title):
                found.append(child)
    return found
