"""Steps of a replica whose fork policy keeps to a time per token.

Each request always has the row of the thread that its reader waits for: the first in reading order
that has not ended. Its further threads run while the predicted step time allows, and rest
otherwise. With every further thread at rest, a request is written in the order of sequential
decoding. A resting thread keeps its KV blocks and only misses steps.

Resting moves work to later steps, which helps only if they have room. Where the first threads and
the prompts that are due fill the steps, all threads run: they end requests sooner.

New prompts are computed in chunks that fit beside the rows, as far as their first tokens are not
due. vLLM's chunks are as large as its token budget, and every reader waits for such a step.

Ideas: TAPER (arXiv 2605.06914) admits branches step by step within the batch's slack; Sarathi-Serve
(arXiv 2403.02310) fits chunks of prompts beside decoding rows. The reading order is ours.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import inf

from apar_core.scheduler.fork_policy import ForkPolicy
from apar_core.scheduler.thread_table import ListGroup, ThreadGroup, ThreadTable
from apar_core.step_costs.costs import StepBatch
from apar_core.tree.thread_names import thread_path
from apar_core.vllm_names import Request

Saved = Callable[[Sequence[Request]], int]
"""Returns the tokens that rows do not read because others of the step have."""

_LEAST_CHUNK = 16
_DUE_SHARE = 0.8
_MOST = 4.0
"""A longer step counts as this multiple of the time per token."""
_FULL = 0.95
"""An overload begins when first threads and prompts take this share of the time per token."""


@lru_cache(maxsize=1 << 16)
def reading_order(root_id: str, thread_id: str) -> tuple[float, ...]:
    """Return a sort key: a thread comes after its children, and these in the order of their forks.

    What a thread writes after a fork is read after the fork's text.
    """
    return (*thread_path(root_id, thread_id), inf)


def first_thread(group: ThreadGroup[Request]) -> str:
    """Return the thread whose text comes first, among the live and the deferred ones."""
    threads = [*group.live, *(child.request_id for child in group.deferred)]
    return min(threads, key=lambda thread_id: _place(group, thread_id))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to compute: its remaining tokens, and the time until its first token is due."""

    tokens: int
    due_s: float


def chunk_tokens(
    prompts: Sequence[Prompt], fits: Callable[[int], bool], step_s: float
) -> int | None:
    """Return how many tokens of prompts to compute in a step; None: as many as vLLM does.

    `prompts` are in the order in which they are computed, and a step takes about `step_s`. The
    chunk is the largest that `fits` beside the rows, but large enough for every prompt to be
    complete when it is due.
    """
    total = sum(prompt.tokens for prompt in prompts)
    if total == 0 or fits(total):
        return None
    sizes = range(_LEAST_CHUNK, total, _LEAST_CHUNK)
    number = bisect_right(sizes, False, key=lambda tokens: not fits(tokens))
    chunk = max(_LEAST_CHUNK, number * _LEAST_CHUNK)
    before = 0
    for prompt in prompts:
        before += prompt.tokens
        chunk = max(chunk, math.ceil(before / max(1.0, prompt.due_s / step_s)))
    return chunk


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step leaves out.

    resting: engine request ids of running threads that take no part. prompts: the same of prompts
    that have begun. chunk: limit on the tokens of each prompt; None: vLLM's. max_tokens: on those
    of the step.
    """

    resting: frozenset[str] = frozenset()
    prompts: frozenset[str] = frozenset()
    chunk: int | None = None
    max_tokens: int | None = None


class Pacing:
    """Plans the steps of a scheduler whose policy looks at time.

    `saved` returns the tokens that rows do not read because others of the step have.
    limit_s: limit on the time of the last planned step; None: the policy's own. It is infinite
        during an overload.
    memory_s: seconds over which the time of steps is averaged, with weights that fall
        exponentially.
    """

    def __init__(
        self,
        threads: ThreadTable[Request],
        saved: Saved,
        clock: Callable[[], float],
        block_size: int,
    ) -> None:
        self.limit_s: float | None = None
        self.memory_s = 1.0
        self._threads = threads
        self._saved = saved
        self._clock = clock
        # A child computes at most the tokens of the block that it does not share.
        self._child_tokens = block_size
        # Mean times of steps with first threads only and with all, and when one was planned.
        self._first_s = self._all_s = 0.0
        self._planned_s = -inf
        self._is_overloaded = False
        # When each waiting prompt was first seen.
        self._seen_s: dict[str, float] = {}

    def plan(
        self,
        policy: ForkPolicy,
        running: Sequence[Request],
        waiting: Sequence[Request],
        max_running: int,
    ) -> StepPlan:
        """Plan the next step, in which at most `max_running` threads may be running or at rest.

        Threads of older requests run first, and within a request those that are read first.
        """
        rows = [request for request in running if not request.is_prefill_chunk]
        children = [each for each in waiting if self._is_child(each)]
        children = children[: max_running - len(running)]
        coming = StepBatch(len(children), sum(each.num_tokens for each in children))
        self.limit_s = None
        limit_s = policy.token_time_s
        whole = batch = _with_rows(coming, rows, self._saved(rows))
        resting: frozenset[str] = frozenset()
        least = whole
        if policy.step_s(whole) > limit_s:
            first, further = self._split(rows, children)
            least = _with_rows(coming, first, self._saved(first))
        if self._is_overloaded:
            self.limit_s = inf
        elif least is not whole:
            batches = _growing(least, further, whole.saved_tokens - least.saved_tokens)
            number = bisect_right(batches, limit_s, key=policy.step_s) - 1
            # Where no first thread can have a row yet, another one goes on.
            number = min(max(number, 0 if first or children else 1), len(further))
            batch = batches[number]
            resting = frozenset(request.request_id for request in further[number:])
        prompts = self._prompts(policy, running, waiting, max_running - len(children))
        chunk = chunk_tokens(
            prompts,
            lambda tokens: policy.step_s(replace(batch, prefill_tokens=tokens)) <= limit_s,
            max(policy.token_time_s, policy.step_s(batch)),
        )
        tokens = sum(prompt.tokens for prompt in prompts) if chunk is None else chunk
        all_s = policy.step_s(replace(self._with_delayed(whole), prefill_tokens=tokens))
        self._average(policy.step_s(replace(least, prefill_tokens=tokens)), all_s, limit_s)
        if chunk is None:
            return StepPlan(resting)
        # vLLM continues prompts before it starts children: one leaves them their tokens.
        begun = [each.request_id for each in running if each.is_prefill_chunk]
        left_out = frozenset(begun[1:] if children else ())
        num_rows = batch.rows - len(children)
        most = num_rows + self._child_tokens * len(children) + chunk
        return StepPlan(resting, left_out, chunk, most)

    def _with_delayed(self, batch: StepBatch) -> StepBatch:
        """Return the batch with the forks that would start if time allowed."""
        delayed = [
            child.num_tokens
            for group in self._threads.groups
            if group.has_startable
            for child in group.deferred
        ]
        return batch.grown(rows=len(delayed), attended_tokens=sum(delayed))

    def _average(self, first_s: float, all_s: float, limit_s: float) -> None:
        """Note how long the step would take with first threads only, and with all threads.

        On average: an overload begins when first threads fill the steps, and ends when all threads
        fit.
        """
        now_s, most_s = self._clock(), _MOST * limit_s
        since_s = now_s - self._planned_s
        self._planned_s = now_s
        if since_s > self.memory_s:
            # The engine had nothing to do.
            self._first_s = self._all_s = 0.0
        weight = -math.expm1(-min(since_s, most_s) / self.memory_s)
        self._first_s += weight * (min(first_s, most_s) - self._first_s)
        self._all_s += weight * (min(all_s, most_s) - self._all_s)
        is_full = self._is_overloaded or self._first_s > _FULL * limit_s
        self._is_overloaded = is_full and self._all_s > limit_s

    def _is_child(self, request: Request) -> bool:
        group = self._threads.group(request.request_id)
        return group is not None and request.request_id != group.root_id

    def _prompts(
        self,
        policy: ForkPolicy,
        running: Sequence[Request],
        waiting: Sequence[Request],
        max_running: int,
    ) -> list[Prompt]:
        now_s = self._clock()
        coming = [each for each in waiting if not self._is_child(each)]
        # Further ones have no place yet.
        del coming[max(0, max_running - len(running)) :]
        coming[:0] = [each for each in running if each.is_prefill_chunk]
        seen_s = {each.request_id: self._seen_s.get(each.request_id, now_s) for each in coming}
        self._seen_s = seen_s
        prompts = []
        for request in coming:
            due_s = seen_s[request.request_id] + _DUE_SHARE * policy.first_token_s - now_s
            tokens = request.num_tokens - request.num_computed_tokens
            prompts.append(Prompt(tokens, 0.0 if self._has_reader(request) else due_s))
        return prompts

    def _has_reader(self, request: Request) -> bool:
        """Return whether a reader has seen text of a request that has to be computed (again)."""
        group = self._threads.group(request.request_id)
        return (
            request.num_output_tokens > 0
            or request.num_preemptions > 0
            or (group is not None and group.has_joined(request.request_id))
        )

    def _split(
        self, rows: Sequence[Request], children: Sequence[Request]
    ) -> tuple[list[Request], list[Request]]:
        """Return the threads that readers wait for, and the others, most urgent first.

        `children` begin in the step, and may be what a reader waits for.
        """
        heads: dict[ThreadGroup[Request], tuple[tuple[float, ...], str]] = {}
        placed: list[tuple[Request, ThreadGroup[Request] | None, tuple[float, ...]]] = []
        for request in (*rows, *children):
            group = self._threads.group(request.request_id)
            order: tuple[float, ...] = ()
            if group is not None:
                order = _place(group, request.request_id)
                found = order, request.request_id
                heads[group] = min(heads.get(group, found), found)
            placed.append((request, group, order))
        first: list[Request] = []
        further: list[tuple[tuple[int, float, float, str], tuple[float, ...], Request]] = []
        for request, group, order in placed[: len(rows)]:
            if group is None or heads[group][1] == request.request_id:
                first.append(request)
            else:
                further.append((group.order, order, request))
        further.sort(key=lambda each: each[:2])
        return first, [request for _, _, request in further]


def _place(group: ThreadGroup[Request], thread_id: str) -> tuple[float, ...]:
    """Return a thread's place in the reading order of its request."""
    if isinstance(group, ListGroup) and thread_id == group.root_id:
        # The root goes on behind an item while threads of later items are ahead of it.
        return ()
    return reading_order(group.root_id, thread_id)


def _with_rows(batch: StepBatch, rows: Sequence[Request], saved: int) -> StepBatch:
    return batch.grown(
        rows=len(rows),
        attended_tokens=sum(request.num_tokens for request in rows),
        saved_tokens=saved,
    )


def _growing(batch: StepBatch, rows: Sequence[Request], saved: int) -> list[StepBatch]:
    """Return the batch with 0, 1, ... of the rows; `saved` tokens are spread over all of them."""
    attended = [0, *accumulate(request.num_tokens for request in rows)]
    return [
        batch.grown(
            rows=number,
            attended_tokens=tokens,
            saved_tokens=saved * number // max(1, len(rows)),
        )
        for number, tokens in enumerate(attended)
    ]
