"""CPU seconds of a tree of processes, by what each process is there for."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress

import psutil

_PURPOSES = (
    ("VLLM::EngineCore", "engine core"),
    ("ray::ServeReplica:apar:Replica", "API server"),
    ("ray::ServeReplica:apar:Gateway", "gateway"),
    ("ray::ServeReplica:bare:Replica", "API server"),
    ("ray::ServeReplica:bare:BareRelay", "gateway"),
    ("haproxy", "HAProxy"),
)


def _purpose(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    for start, purpose in _PURPOSES:
        if title.startswith(start) or f"/{start} " in title:
            return purpose
    return "API server" if "api_server.entry" in title else "Ray and Serve"


def cpu_seconds(roots: list[psutil.Process]) -> dict[str, float]:
    """CPU seconds that each purpose has used so far, below and including `roots`."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for root in roots:
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds[_purpose(process)] += times.user + times.system
    return seconds
