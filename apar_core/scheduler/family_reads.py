"""KV reads that family attention saves, estimated from threads before their step is scheduled.

The worker groups rows by their block tables (`apar_core/attention/families.py`). A fork policy asks
earlier: what will the coming batch read, and what does one more thread add? Threads of a request
begin with the same tokens, up to the fork at which they part. So the estimate compares tokens, and
takes a group for each request. It misses what requests share with each other, and blocks that a
preempted thread has got back as copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from apar_core.attention.settings import FURTHER_THREAD_COST, FamilySettings
from apar_core.scheduler.thread_table import ThreadGroup, ThreadTable
from apar_core.vllm_names import worker_in_this_process

Threads = Sequence[Any]
"""vLLM requests, one per thread."""


class FamilyReads:
    """Saved tokens of the running threads, by request.

    settings: None where each row reads its own blocks; then nothing is saved.
    layer_share: share of the attention layers that read families. Only the workers know it, once
        their model is built; until they have told (`ask_workers`), all layers count.
    """

    def __init__(
        self, threads: ThreadTable[Any], block_size: int, settings: FamilySettings | None
    ) -> None:
        self.settings = settings
        self.layer_share = 1.0
        self.has_asked = False
        self._threads = threads
        self._block_size = block_size
        # By root id: the live threads, and the blocks that they begin with. These change only with
        # the threads.
        self._known: dict[str, tuple[tuple[str, ...], int]] = {}

    def saved_tokens(self, running: Iterable[Any]) -> int:
        """Return the attended tokens of these threads that another one reads for them."""
        if self.settings is None:
            return 0
        families: dict[str, list[Any]] = {}
        for thread in running:
            group = self._threads.group(thread.request_id)
            if group is not None:
                families.setdefault(group.root_id, []).append(thread)
        self._known = {root: self._known[root] for root in families if root in self._known}
        saved = sum(self._saved_blocks(root, each) for root, each in families.items())
        return self._tokens(saved) if saved >= self.settings.min_saved_blocks else 0

    def saved_by(self, group: ThreadGroup[Any], child: Any, running: Iterable[Any]) -> int:
        """Return the tokens that a child saves if it joins the running threads of its request.

        With its siblings it may have less in common than they have among themselves.
        """
        if self.settings is None:
            return 0
        siblings = [thread for thread in running if thread.request_id in group.live]
        if not siblings:
            return 0
        before = self._saved_blocks(group.root_id, siblings)
        shared = min(
            self._common_blocks(group.root_id, siblings),
            _common(siblings[0], child) // self._block_size,
        )
        return self._tokens(max(self._worth(len(siblings) + 1, shared) - before, 0))

    @property
    def thread_weight(self) -> float:
        """Cost of a thread beside others of its request, over that of a request's first thread."""
        if self.settings is None:
            return 1.0
        return 1 - self.layer_share * (1 - FURTHER_THREAD_COST)

    def _tokens(self, saved_blocks: int) -> int:
        return int(saved_blocks * self._block_size * self.layer_share)

    def _saved_blocks(self, root_id: str, threads: Threads) -> int:
        return self._worth(len(threads), self._common_blocks(root_id, threads))

    def _worth(self, num_threads: int, blocks: int) -> int:
        assert self.settings is not None
        limits = self.settings
        pays = num_threads >= limits.min_rows and blocks >= limits.min_prefix_blocks
        return (num_threads - 1) * blocks if pays else 0

    def _common_blocks(self, root_id: str, threads: Threads) -> int:
        """Return the full blocks that all threads begin with."""
        names = tuple(thread.request_id for thread in threads)
        known = self._known.get(root_id)
        # A single thread grows, and shares nothing.
        if known is not None and known[0] == names and len(names) > 1:
            return known[1]
        first = threads[0]
        num_tokens = min((_common(first, each) for each in threads[1:]), default=first.num_tokens)
        blocks = num_tokens // self._block_size
        self._known[root_id] = names, blocks
        return blocks


def ask_workers(engine_core: Any) -> None:
    """Ask an engine core's workers which of their layers read families.

    They are asked once, before the first request, and later only a worker in this process, as
    workers elsewhere answer after their steps. A layer may not fit for a reason that only the
    worker knows, such as the attention backend.
    """
    reads: FamilyReads | None = getattr(engine_core.scheduler, "family_reads", None)
    if reads is None or reads.settings is None:
        return
    worker = worker_in_this_process(engine_core)
    if worker is not None:
        answers = [worker.family_layers()]
    elif not reads.has_asked:
        answers = engine_core.collective_rpc("family_layers")
    else:
        return
    reads.has_asked = True
    # Virtual workers have no layers.
    known = [answer for answer in answers if answer is not None]
    if num_layers := sum(num for _, num in known):
        reads.layer_share = sum(num_read for num_read, _ in known) / num_layers


def _common(first: Any, second: Any) -> int:
    """Return how many tokens two threads begin with together."""
    low, high = 0, min(first.num_tokens, second.num_tokens)
    first_ids, second_ids = first.all_token_ids, second.all_token_ids
    # Comparing slices is faster than comparing tokens one by one.
    while low < high:
        middle = (low + high + 1) // 2
        if first_ids[low:middle] == second_ids[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
