"""Share a thread's KV blocks with the next ones, and keep them alive until these are scheduled.

A fork after n tokens shares all full blocks of these tokens and copies the partly filled one
(APAR, section 2.3: "copies at most 1 KV cache block"). The copy is vLLM's copy-on-write for prefix
hits that end inside a block.

A thread that waits for its children continues after a joined text. Blocks are kept for it in the
same way: its own, then those of its first child, which begins with the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from apar_core.vllm_names import (
    FullAttentionManager,
    KVCacheBlocks,
    KVCacheManager,
    Request,
    RequestStatus,
    cdiv,
)

_ALLOCATE = "allocate_slots"


@dataclass(slots=True)
class ForkCounters:
    """Cost of forks since the engine started.

    shared_tokens, computed_tokens: prompt tokens of children whose KV came from the parent, and
        those that were computed.
    shared_blocks, copied_blocks: full blocks used by parent and child, and partly filled ones.
    released_early_blocks: blocks freed by threads that ended before their request.
    fallbacks: forks whose parent had no KV to share any more, or whose reference was given up
        because memory was short.
    """

    forks: int = 0
    shared_tokens: int = 0
    computed_tokens: int = 0
    shared_blocks: int = 0
    copied_blocks: int = 0
    released_early_blocks: int = 0
    fallbacks: int = 0


@dataclass(slots=True)
class JoinCounters:
    """Cost of joins since the engine started: tokens before a thread that continues after one.

    shared_tokens: those whose KV was kept or cached. computed_tokens: those that were computed,
        most of them for the second time.
    discarded_tokens: generated tokens that are no part of the text; threads that end with a list
        cause them (`scheduler/lists.py`).
    """

    joins: int = 0
    shared_tokens: int = 0
    computed_tokens: int = 0
    discarded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Reference on the blocks of a waiting child's first `num_tokens` tokens."""

    blocks: KVCacheBlocks
    num_tokens: int


class BlockSharing:
    """Block references of the children that have not been scheduled yet.

    A child's reference is dropped when it gets its own blocks, or when memory is short. For that,
    the KV cache manager's `allocate_slots` is replaced. vLLM calls it for every row of every step,
    so it is replaced only while such a case is possible: see `begin_step` and `prefix`.

    `row_tokens` is the most that a decoding row computes in a step.
    """

    def __init__(
        self, manager: KVCacheManager, num_running: Callable[[], int], row_tokens: int = 1
    ) -> None:
        self.counters = ForkCounters()
        self.join_counters = JoinCounters()
        self._manager = manager
        self._num_running = num_running
        self._row_tokens = row_tokens
        self._is_replaced = False
        self._prefixes: dict[str, SharedPrefix] = {}
        self._unscheduled: set[str] = set()
        # Threads among `_unscheduled` that continue after a joined text.
        self._continuing: set[str] = set()
        single_managers = manager.coordinator.single_type_managers
        self._block_sizes = [single.block_size for single in single_managers]
        # If disabled, children find their prefix in the prefix cache like any request. Other kinds
        # of attention drop or relocate blocks; the benchmark of fork costs disables it too.
        self.enabled = all(type(single) is FullAttentionManager for single in single_managers)
        self._allocate = manager.allocate_slots

    def share(self, parent: Request, child: Request, num_inherited: int) -> None:
        """Reference the parent's blocks of the child's prompt until the child takes them.

        The first `num_inherited` tokens of the child's prompt are the parent's.
        """
        # A request computes at least the last token of its prompt.
        num_tokens = min(num_inherited, child.num_prompt_tokens - 1)
        self.counters.forks += 1
        self._unscheduled.add(child.request_id)
        self.hold(child.request_id, parent, num_tokens)

    def hold(self, request_id: str, owner: Request, num_tokens: int) -> int:
        """Reference the blocks of a thread's first tokens for another engine request.

        Replaces an earlier reference for that request. Returns how many tokens are held, at most
        those that have been computed.
        """
        self._release(request_id)
        num_tokens = min(num_tokens, owner.num_computed_tokens)
        if num_tokens <= 0 or not self.enabled:
            return 0
        groups = self._manager.get_blocks(owner.request_id).blocks
        kept = tuple(
            list(blocks[: cdiv(num_tokens, block_size)])
            for blocks, block_size in zip(groups, self._block_sizes, strict=True)
        )
        for blocks in kept:
            self._manager.block_pool.touch(blocks)
        prefix = SharedPrefix(self._manager.create_kv_cache_blocks(kept), num_tokens)
        self._prefixes[request_id] = prefix
        return num_tokens

    def continues(self, request_id: str, num_tokens: int) -> None:
        """Let a thread that has waited take what is held for it when it is scheduled.

        `num_tokens` is the length of its prompt, of which it computes at least the last one.
        """
        self._shorten(request_id, num_tokens - 1)
        self._unscheduled.add(request_id)
        self._continuing.add(request_id)

    def _shorten(self, request_id: str, num_tokens: int) -> None:
        prefix = self._prefixes.get(request_id)
        if prefix is None or prefix.num_tokens <= num_tokens:
            return
        kept = []
        for blocks, size in zip(prefix.blocks.blocks, self._block_sizes, strict=True):
            number = cdiv(num_tokens, size)
            self._manager.block_pool.free_blocks(reversed(blocks[number:]))
            kept.append(list(blocks[:number]))
        self._prefixes[request_id] = SharedPrefix(
            self._manager.create_kv_cache_blocks(tuple(kept)), num_tokens
        )

    def begin_step(self, running: Sequence[Request]) -> None:
        """Prepare for the allocations of a step, which continues the `running` threads first."""
        if self._prefixes and (not running or self._may_run_short(running)):
            self._replace_allocation()

    def end_step(self) -> None:
        """Leave allocation to vLLM again."""
        if self._is_replaced:
            delattr(self._manager, _ALLOCATE)
            self._is_replaced = False

    def prefix(self, request_id: str) -> SharedPrefix | None:
        """Return the shared prefix that a child has not taken yet.

        The scheduler asks for it right before it allocates the child's blocks.
        """
        if request_id in self._unscheduled:
            self._replace_allocation()
        return self._prefixes.get(request_id)

    def forget(self, request_id: str) -> None:
        """Drop the reference of a thread that has ended or will not start."""
        self._unscheduled.discard(request_id)
        self._continuing.discard(request_id)
        self._release(request_id)

    def count_released_early(self, request_id: str) -> None:
        """Count the blocks that only this thread uses, right before it is freed."""
        groups = self._manager.get_blocks(request_id).blocks
        self.counters.released_early_blocks += sum(
            block.ref_cnt == 1 and not block.is_null for blocks in groups for block in blocks
        )

    def release_all(self) -> None:
        """Drop every reference; children then look for their prefix in the prefix cache."""
        for request_id in list(self._prefixes):
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        prefix = self._prefixes.pop(request_id, None)
        if prefix is None:
            return
        for blocks in prefix.blocks.blocks:
            # Reversed, so that the tail is evicted first, as when vLLM frees a request.
            self._manager.block_pool.free_blocks(reversed(blocks))

    def _replace_allocation(self) -> None:
        # Not through `vars`: CPython 3.11 takes longer for every method call of an object whose
        # dictionary has ever been asked for.
        setattr(self._manager, _ALLOCATE, self._allocate_slots)
        self._is_replaced = True

    def _may_run_short(self, running: Sequence[Request]) -> bool:
        """Return whether a running thread may find no free block in the coming step."""
        most_blocks = len(running) * self._row_tokens * len(self._block_sizes)
        return self._manager.block_pool.get_num_free_blocks() < most_blocks or any(
            request.is_prefill_chunk for request in running
        )

    def _allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        if request.request_id in self._prefixes:
            # vLLM's `watermark` keeps blocks free for running requests to grow into. A fork that
            # shares its parent's blocks is such growth.
            kwargs["has_scheduled_reqs"] = False
        new_blocks = self._allocate(request, *args, **kwargs)
        if new_blocks is None and self._prefixes:
            new_blocks = self._allocate_without_waiting_prefixes(request, args, kwargs)
        if new_blocks is not None and request.request_id in self._unscheduled:
            self._count(request, **kwargs)
            self.forget(request.request_id)
        return new_blocks

    def _allocate_without_waiting_prefixes(
        self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> KVCacheBlocks | None:
        """Give up prefixes of waiting children, youngest first, if the request cannot wait.

        A running request would otherwise preempt another. If nothing runs, nothing else would ever
        free a block.
        """
        nothing_runs = self._num_running() == 0
        if request.status != RequestStatus.RUNNING and not nothing_runs:
            return None
        for other_id in list(reversed(self._prefixes)):
            if other_id == request.request_id:
                continue
            self._release(other_id)
            new_blocks = self._allocate(request, *args, **kwargs)
            if new_blocks is not None:
                return new_blocks
        if nothing_runs:
            self._release(request.request_id)
        return None

    def _count(self, request: Request, *, num_new_computed_tokens: int = 0, **_: Any) -> None:
        if request.request_id in self._continuing:
            self.join_counters.joins += 1
            self.join_counters.shared_tokens += num_new_computed_tokens
            self.join_counters.computed_tokens += (
                request.num_prompt_tokens - num_new_computed_tokens
            )
            return
        self.counters.fallbacks += request.request_id not in self._prefixes
        self.counters.shared_tokens += num_new_computed_tokens
        self.counters.computed_tokens += request.num_prompt_tokens - num_new_computed_tokens
        for block_size in self._block_sizes:
            self.counters.shared_blocks += num_new_computed_tokens // block_size
            self.counters.copied_blocks += num_new_computed_tokens % block_size != 0
