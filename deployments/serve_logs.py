"""Keeps Ray Serve's log of a process in order where a library sets its own up anew."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

_SERVE_LOGGER = "ray.serve"


@contextmanager
def kept_serve_logs() -> Iterator[None]:
    """Give Ray Serve's log handlers back what they lose within.

    vLLM configures logging when it is imported, and again when an engine's configuration is made.
    Each time that closes every handler of the process and takes the file from Ray Serve's. A
    controller that has been restarted asks each replica for that file, and would give up the
    replicas, although they serve.
    """
    targets = [
        (handler, handler.target)
        for handler in logging.getLogger(_SERVE_LOGGER).handlers
        if isinstance(handler, MemoryHandler)
    ]
    try:
        yield
    finally:
        for handler, target in targets:
            handler.setTarget(target)
