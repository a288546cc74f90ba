"""The decoding rows of a simulated engine, kept so that many steps cost no more than one.

Every row gains one token a step, so what a row needs changes only at its forks and its end: a heap
of steps tells when. KV blocks are counted by how far each row is into its last block.
"""

from __future__ import annotations

from heapq import heappop, heappush

from benchmarks.cluster_simulation.threads import Thread


class DecodeBatch:
    """Threads that get a token in every step; `step` arguments count the engine's steps."""

    def __init__(self, block_size: int) -> None:
        self.rows: dict[Thread, None] = {}
        self._block_size = block_size
        self._offsets = 0
        self._phases = [0] * block_size
        self._events: list[tuple[int, tuple[bool, int, int], int, Thread]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, thread: Thread, step: int) -> None:
        """Let a thread decode from this step on, with `thread.length` tokens in the KV cache."""
        thread.offset = thread.length - step
        thread.base = step
        self.rows[thread] = None
        self._offsets += thread.offset
        self._phases[thread.offset % self._block_size] += 1
        self.expect(thread)

    def expect(self, thread: Thread) -> None:
        """Note when the thread forks next or ends."""
        heappush(self._events, (thread.event_step(), thread.order, thread.epoch, thread))

    def remove(self, thread: Thread, step: int) -> None:
        """Take a thread out; its `length` and `generated` are of this step."""
        del self.rows[thread]
        self._offsets -= thread.offset
        self._phases[thread.offset % self._block_size] -= 1
        thread.epoch += 1
        thread.length = thread.offset + step
        thread.generated += step - thread.base
        thread.base = step

    def attended(self, step: int) -> int:
        """Tokens of KV cache that all rows read in the step."""
        return self._offsets + len(self.rows) * step

    def next_event(self) -> int | None:
        """The first step after which a row forks or ends."""
        events = self._events
        while events and events[0][2] != events[0][3].epoch:
            heappop(events)
        return events[0][0] if events else None

    def pop_due(self, step: int) -> Thread | None:
        """The next row whose event is due at this step."""
        event = self.next_event()
        if event is None or event > step:
            return None
        return heappop(self._events)[3]

    def new_blocks(self, step: int) -> int:
        """Blocks that the rows begin in this step."""
        return self._phases[(1 - step) % self._block_size]

    def growth(self, step: int, num_steps: int) -> int:
        """Blocks that the rows begin in so many steps from this one."""
        cycles, rest = divmod(num_steps, self._block_size)
        return cycles * len(self.rows) + sum(self.new_blocks(step + ahead) for ahead in range(rest))

    def steps_that_fit(self, step: int, most: int, free_blocks: int) -> int:
        """How many of `most` steps the free blocks suffice for."""
        rows = len(self.rows)
        cycles = -(-most // self._block_size)
        if cycles * rows <= free_blocks:
            return most
        fitting = free_blocks // rows * self._block_size
        left = free_blocks % rows
        while fitting < most and self.new_blocks(step + fitting) <= left:
            left -= self.new_blocks(step + fitting)
            fitting += 1
        return min(fitting, most)
