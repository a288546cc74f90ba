"""Steps of a replica whose fork policy keeps to a time per token.

Each request always has the row of the thread that its reader waits for: the first in reading order
that has not ended. Its further threads run while the predicted step time allows, and rest
otherwise. With every further thread at rest, a request is written in the order of sequential
decoding. A resting thread keeps its KV blocks and only misses steps.

New prompts are computed in chunks that fit beside the rows, as far as their first tokens are not
due. vLLM's chunks are as large as its token budget, and every reader waits for such a step.

Ideas: TAPER (arXiv 2605.06914) admits branches step by step within the batch's slack; Sarathi-Serve
(arXiv 2403.02310) fits chunks of prompts beside decoding rows. The reading order is ours.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from apar_core.scheduler.fork_policy import ForkPolicy
from apar_core.scheduler.thread_table import ThreadGroup, ThreadTable
from apar_core.step_costs.costs import StepBatch
from apar_core.tree.thread_names import thread_path
from apar_core.vllm_names import Request

Saved = Callable[[Sequence[Request]], int]
"""Returns the tokens that rows do not read because others of the step have."""

_LEAST_CHUNK = 16
# A child computes at most the tokens of the block that it does not share.
_CHILD_TOKENS = 16
_DUE_SHARE = 0.8
# Multiple of the policy's time beyond which the first threads alone count as an overload, and
# multiple of what they take beyond that, which further threads may add.
_OVERLOAD, _OVERLOAD_WEIGHT = 1.05, 4.0


@lru_cache(maxsize=1 << 16)
def reading_order(root_id: str, thread_id: str) -> tuple[float, ...]:
    """Return a sort key: a thread comes after its children, and these in the order of their forks.

    What a thread writes after a fork is read after the fork's text.
    """
    return (*thread_path(root_id, thread_id), inf)


def first_thread(group: ThreadGroup[Request]) -> str:
    """Return the thread whose text comes first, among the live and the deferred ones."""
    threads = [*group.live, *(child.request_id for child in group.deferred)]
    return min(threads, key=lambda thread_id: reading_order(group.root_id, thread_id))


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
        chunk = max(chunk, math.ceil(before / max(1.0, prompt.due_s // step_s)))
    return chunk


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step leaves out.

    resting: engine request ids of running threads that take no part.
    chunk: limit on the tokens of each prompt; None: vLLM's. max_tokens: on those of the step.
    """

    resting: frozenset[str] = frozenset()
    chunk: int | None = None
    max_tokens: int | None = None


class Pacing:
    """Plans the steps of a scheduler whose policy looks at time.

    `saved` returns the tokens that rows do not read because others of the step have.
    limit_s: limit on the time of the last planned step; None: the policy's own. It is above the
        policy's time where even the first threads of all requests take longer: forks then end
        requests sooner, and the more threads may run, the larger the overload is.
    """

    def __init__(
        self, threads: ThreadTable[Request], saved: Saved, clock: Callable[[], float]
    ) -> None:
        self.limit_s: float | None = None
        self._threads = threads
        self._saved = saved
        self._clock = clock
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

        def step_s(requests: Sequence[Request], prompt_tokens: int = 0) -> float:
            attended = sum(request.num_tokens for request in requests)
            num_rows, saved = len(requests) + len(children), self._saved(requests)
            return policy.step_s(StepBatch(num_rows, attended, prompt_tokens, saved_tokens=saved))

        self.limit_s = None
        limit_s = policy.token_time_s
        active = rows
        if step_s(rows) > limit_s:
            first, further = self._split(rows)
            first_s = step_s(first)
            if first_s > _OVERLOAD * limit_s:
                limit_s = first_s + _OVERLOAD_WEIGHT * (first_s - _OVERLOAD * limit_s)
                self.limit_s = limit_s
            number = bisect_right(
                range(1, len(further) + 1),
                False,
                key=lambda number: step_s([*first, *further[:number]]) > limit_s,
            )
            # Where no first thread can have a row yet, another one goes on.
            number = max(number, 0 if first or children else 1)
            active = [*first, *further[:number]]
        names = {request.request_id for request in active}
        resting = {each.request_id for each in rows if each.request_id not in names}
        prompts = self._prompts(policy, running, waiting)
        chunk = chunk_tokens(
            prompts, lambda tokens: step_s(active, tokens) <= limit_s, policy.token_time_s
        )
        if chunk is None:
            return StepPlan(frozenset(resting))
        if children:
            # vLLM continues prompts before it starts children: one leaves them their tokens.
            begun = [request for request in running if request.is_prefill_chunk]
            resting |= {request.request_id for request in begun[1:]}
        most = len(active) + _CHILD_TOKENS * len(children) + chunk
        return StepPlan(frozenset(resting), chunk, most)

    def _is_child(self, request: Request) -> bool:
        group = self._threads.group(request.request_id)
        return group is not None and request.request_id != group.root_id

    def _prompts(
        self, policy: ForkPolicy, running: Sequence[Request], waiting: Sequence[Request]
    ) -> list[Prompt]:
        now_s = self._clock()
        coming = [each for each in running if each.is_prefill_chunk]
        coming += [each for each in waiting if not self._is_child(each)]
        seen_s = {each.request_id: self._seen_s.get(each.request_id, now_s) for each in coming}
        self._seen_s = seen_s
        prompts = []
        for request in coming:
            due_s = seen_s[request.request_id] + _DUE_SHARE * policy.first_token_s - now_s
            # A reader already waits for a request that was preempted.
            is_late = request.num_output_tokens > 0
            tokens = request.num_tokens - request.num_computed_tokens
            prompts.append(Prompt(tokens, 0.0 if is_late else due_s))
        return prompts

    def _split(self, rows: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Return the threads that readers wait for, and the others, most urgent first."""
        first: list[Request] = []
        further: list[tuple[tuple[int, float, float, str], tuple[float, ...], Request]] = []
        heads: dict[ThreadGroup[Request], str] = {}
        for request in rows:
            group = self._threads.group(request.request_id)
            if group is None:
                first.append(request)
                continue
            if group not in heads:
                heads[group] = first_thread(group)
            if request.request_id == heads[group]:
                first.append(request)
            else:
                order = reading_order(group.root_id, request.request_id)
                further.append((group.order, order, request))
        further.sort(key=lambda each: each[:2])
        return first, [request for _, _, request in further]
