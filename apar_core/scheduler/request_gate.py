"""Limit on the client requests that an engine answers at once, however many threads each has.

Source: the limits of 350 and 180 concurrent requests in APAR (arXiv 2401.06761), appendix C.2.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from apar_core.vllm_names import PriorityRequestQueue, Request


class GatedQueue(PriorityRequestQueue):
    """vLLM's queue of waiting requests, with further requests held back before it.

    Held requests are part of the queue (length, iteration, removal), but vLLM cannot pop them.
    `arrives` is called before a client's request is queued, `left` when all its threads have ended.
    Threads of admitted requests pass freely. `max_requests` None holds nothing back.
    """

    def __init__(self, max_requests: int | None = None) -> None:
        super().__init__()
        self.max_requests = max_requests
        # By engine request id of the root thread.
        self._inside: set[str] = set()
        self._outside: set[str] = set()
        self._held: list[Request] = []
        self._num_without_room = 0

    @property
    def num_held(self) -> int:
        """Requests held back."""
        return len(self._held)

    @property
    def num_ready(self) -> int:
        """Requests and threads queued since the last schedule, which may run in the next step.

        Those that the last schedule left in the queue found no memory, and so will not run yet.
        """
        return max(super().__len__() - self._num_without_room, 0)

    def admitted(self) -> list[Request]:
        """Return the waiting requests that are not held back, in order."""
        return list(super().__iter__())

    def scheduled(self) -> None:
        """Note that a step has been scheduled, and has popped all that had room."""
        self._num_without_room = super().__len__()

    def arrives(self, root_id: str) -> None:
        """Admit or hold back a client's request that is about to be queued."""
        (self._inside if self._has_place else self._outside).add(root_id)

    def enters(self, root_id: str) -> None:
        """Admit a client's request unconditionally, as one that another engine has started."""
        self._outside.discard(root_id)
        self._inside.add(root_id)

    def left(self, root_id: str) -> None:
        """Free the place of a request that has ended or was removed while held back."""
        self._inside.discard(root_id)
        self._outside.discard(root_id)
        while self._held and self._has_place:
            request = heapq.heappop(self._held)
            self.enters(request.request_id)
            super().add_request(request)

    def add_request(self, request: Request) -> None:
        """Queue a request, or hold it back."""
        if request.request_id in self._outside:
            heapq.heappush(self._held, request)
        else:
            super().add_request(request)

    def remove_request(self, request: Request) -> None:
        """Remove a request, held back or not."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove requests, held back or not."""
        removed = set(requests)
        super().remove_requests(removed)
        self._held = [request for request in self._held if request not in removed]
        heapq.heapify(self._held)

    def __len__(self) -> int:
        """Number of waiting requests, held back or not; `bool` is whether one can be popped."""
        return super().__len__() + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all waiting requests in order."""
        return iter(sorted([*super().__iter__(), *self._held]))

    @property
    def _has_place(self) -> bool:
        return self.max_requests is None or len(self._inside) < self.max_requests
