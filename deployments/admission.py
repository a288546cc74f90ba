"""Bounds the requests that one gateway lets in."""

from collections.abc import Iterator
from contextlib import contextmanager

from apar_core.errors import CapacityError


class Admission:
    """Counts the requests inside: running at a replica or waiting for one.

    Exact for one gateway, because it counts before anything is awaited. Ray Serve's own
    `max_queued_requests` also counts requests that are about to get a free replica, and so
    refuses part of a burst that there is room for.
    """

    def __init__(self, *, max_running: int, max_queued: int) -> None:
        self._limit = max_running + max_queued
        self._max_queued = max_queued
        self._inside = 0

    @property
    def inside(self) -> int:
        """Requests admitted and not yet answered."""
        return self._inside

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a place for as long as the request lasts; raises CapacityError if there is none."""
        if self._inside >= self._limit:
            raise CapacityError(
                f"All replicas are busy and {self._max_queued} requests are waiting; "
                "please try again.",
                retry_after_s=1.0,
            )
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
