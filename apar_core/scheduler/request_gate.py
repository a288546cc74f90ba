"""Keeps client requests waiting while as many as may run are being answered.

Counts requests, however many threads each has: a fork needs no leave. Source: the limit of 350 and
180 concurrent requests in APAR (arXiv 2401.06761), appendix C.2.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.request import Request


class GatedQueue(PriorityRequestQueue):
    """vLLM's queue of waiting requests; what stands before the gate is in it, but not offered.

    `arrives` is called for a client's request before it is queued, `left` when all its threads
    have ended. None for `max_requests` holds nothing back.
    """

    def __init__(self, max_requests: int | None = None) -> None:
        super().__init__()
        self.max_requests = max_requests
        # By engine request id of the root thread.
        self._inside: set[str] = set()
        self._outside: set[str] = set()
        self._held: list[Request] = []
        self._num_passed_over = 0

    @property
    def num_held(self) -> int:
        """Requests before the gate."""
        return len(self._held)

    @property
    def num_ready(self) -> int:
        """Requests and threads that have come since the last schedule, and may run in the next.

        What that one has left waiting found no memory, and so will not run beside what runs.
        """
        return max(super().__len__() - self._num_passed_over, 0)

    def scheduled(self) -> None:
        """A step has been scheduled, and has taken from the queue what there was room for."""
        self._num_passed_over = super().__len__()

    def arrives(self, root_id: str) -> None:
        """A client's request is about to be queued."""
        (self._inside if self._has_place else self._outside).add(root_id)

    def enters(self, root_id: str) -> None:
        """A client's request goes on that another engine has begun: it does not wait again."""
        self._outside.discard(root_id)
        self._inside.add(root_id)

    def left(self, root_id: str) -> None:
        """Nothing of a request is alive any more, or it was taken back before it came in."""
        self._inside.discard(root_id)
        self._outside.discard(root_id)
        while self._held and self._has_place:
            request = heapq.heappop(self._held)
            self.enters(request.request_id)
            super().add_request(request)

    def add_request(self, request: Request) -> None:
        """Queue a request, before the gate if it has to wait there."""
        if request.request_id in self._outside:
            heapq.heappush(self._held, request)
        else:
            super().add_request(request)

    def remove_request(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take requests out, wherever they stand."""
        removed = set(requests)
        super().remove_requests(removed)
        self._held = [request for request in self._held if request not in removed]
        heapq.heapify(self._held)

    def __len__(self) -> int:
        """All that wait, before the gate and behind it; `bool` tells whether one may be taken."""
        return super().__len__() + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in their order."""
        return iter(sorted([*super().__iter__(), *self._held]))

    @property
    def _has_place(self) -> bool:
        return self.max_requests is None or len(self._inside) < self.max_requests
