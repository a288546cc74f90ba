"""Build the vLLM request of a thread: of a child at a fork, and of a thread that is resumed.

A thread is a prompt: the tokens on its path so far. A child's prompt is its parent's sequence up to
the fork token, then the child token. A request whose engine was lost is resumed from its journal in
the same way: each unfinished thread becomes a request whose prompt is the client's prompt and all
that the thread has read and generated. No token is generated again, and common
prefixes are computed once, through the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any

from vllm.sampling_params import SamplingParams

from apar_core.errors import TreeError
from apar_core.fork_parameters import EXTRA_ARG, ForkParameters, child_seed, derived_seed
from apar_core.journal import Journal, ThreadDelta, from_plain
from apar_core.scheduler.thread_table import ThreadGroup
from apar_core.tree.thread_names import ThreadPath, thread_request_id
from apar_core.vllm_names import (
    Request,
    add_bad_words,
    bad_words_of,
    block_hasher,
    inherit_block_hashes,
)

_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
RESUME_ARG = "apar_resume"
"""Key of `SamplingParams.extra_args` with a journal for the scheduler, as plain values.

The journal has an entry for every fork token, parents before their children.
"""


def build_child_request(
    parent: Request,
    *,
    request_id: str,
    ordinal: int,
    fork_index: int,
    parameters: ForkParameters,
    max_tokens: int,
) -> Request:
    """Return a request that continues the parent's tokens up to the cut, then the child's seed.

    `fork_index` is the position of the fork token in the parent's sequence. `ordinal` counts the
    parent's forks from 0, and `max_tokens` is the rest of the request's budget.
    """
    return build_thread_request(
        parent,
        request_id=request_id,
        ordinal=ordinal,
        num_inherited=parameters.num_inherited(fork_index),
        seed=parameters.seed_ids,
        max_tokens=max_tokens,
    )


def build_thread_request(
    parent: Request,
    *,
    request_id: str,
    ordinal: int,
    num_inherited: int,
    seed: Sequence[int],
    max_tokens: int,
) -> Request:
    """Return a request that continues the parent's first `num_inherited` tokens and a forced seed.

    Other arguments are as in `build_child_request`.
    """
    if parent.sampling_params is None:
        raise TreeError(f"request {parent.request_id!r} forked, but does not sample tokens")
    # Shallow: nobody changes what parameters hold, and a deep copy takes as long as a fork.
    params = copy(parent.sampling_params)
    params.max_tokens = max_tokens
    params.min_tokens = 0
    # The root thread reports on the prompt.
    params.prompt_logprobs = None
    params.prompt_logprob_token_ids = None
    params.skip_reading_prefix_cache = False
    params.seed = child_seed(params.seed, ordinal)
    parent_path = (params.extra_args or {})[EXTRA_ARG]["thread_path"]
    _set_parameters(params, thread_path=(*parent_path, ordinal), num_generated=0)
    for name in _TRANSFERS:
        # A child has its prefix from its parent. A connector would load the root's prompt again.
        (params.extra_args or {}).pop(name, None)
    child = Request(
        request_id=request_id,
        prompt_token_ids=[*parent.all_token_ids[:num_inherited], *seed],
        sampling_params=params,
        pooling_params=None,
        client_index=parent.client_index,
        arrival_time=_behind(parent.arrival_time),
        mm_features=parent.mm_features if num_inherited else None,
        lora_request=parent.lora_request,
        cache_salt=parent.cache_salt,
        priority=parent.priority,
    )
    inherit_block_hashes(parent, child, num_shared_tokens=num_inherited)
    return child


def build_continuation(
    parent: Request, sequence: list[int], *, num_kept: int, num_generated: int, max_tokens: int
) -> Request:
    """Return a request in which a thread continues after a joined text.

    `sequence` begins with the first `num_kept` tokens of `parent`, the thread's engine request
    before the join. `num_generated` counts the tokens that the thread has generated so far.
    """
    if parent.sampling_params is None:
        raise TreeError(f"request {parent.request_id!r} waits, but does not sample tokens")
    params = copy(parent.sampling_params)
    params.max_tokens = max_tokens
    params.prompt_logprobs = None
    params.prompt_logprob_token_ids = None
    params.skip_reading_prefix_cache = False
    # No random number is drawn twice.
    params.seed = derived_seed(params.seed, f"^{num_generated}")
    _set_parameters(params, num_generated=num_generated)
    for name in _TRANSFERS:
        (params.extra_args or {}).pop(name, None)
    continuation = Request(
        request_id=parent.request_id,
        prompt_token_ids=sequence,
        sampling_params=params,
        pooling_params=None,
        client_index=parent.client_index,
        arrival_time=parent.arrival_time,
        mm_features=parent.mm_features,
        lora_request=parent.lora_request,
        cache_salt=parent.cache_salt,
        priority=parent.priority,
        trace_headers=parent.trace_headers,
    )
    inherit_block_hashes(parent, continuation, num_shared_tokens=num_kept)
    # The first request has reported what vLLM counts of a prompt.
    continuation.prefill_stats = None
    return continuation


def take_journal(params: SamplingParams | None) -> Journal | None:
    """Remove and return the journal in a request's parameters; None for a new request.

    The remaining parameters go to the workers with every thread.
    """
    if params is None or not params.extra_args or RESUME_ARG not in params.extra_args:
        return None
    values = params.extra_args[RESUME_ARG]
    forget_journal(params)
    return from_plain(values)


def forget_journal(params: SamplingParams | None) -> None:
    """Remove a journal from a request's parameters, for example one that a client has sent."""
    if params is not None and params.extra_args and RESUME_ARG in params.extra_args:
        params.extra_args = {k: v for k, v in params.extra_args.items() if k != RESUME_ARG}


def resumed_alone(request: Request, journal: Journal) -> Request:
    """Return a request that may not fork, continued after its journal."""
    (root,) = journal
    tokens = [*_prompt(request), *root.token_ids]
    return resumed_thread(request, root, tokens, request.max_tokens - len(root.token_ids))


def resumed_threads(
    request: Request, journal: Journal, group: ThreadGroup[Request]
) -> list[Request]:
    """Return the unfinished threads of a forked request, and set the counts of its group.

    Threads that have generated tokens come first, then by path.
    """
    parameters = group.parameters
    for delta in journal:
        group.count_text(delta.token_ids, stopped=delta.stopped)
        group.num_forks += bool(delta.path) and not delta.was_refused
        group.num_children[thread_request_id(group.root_id, delta.path)] = delta.token_ids.count(
            parameters.fork_id
        )
    sequences = thread_sequences(journal, _prompt(request), parameters)
    unfinished = sorted(
        (delta for delta in journal if delta.finish_reason is None),
        key=lambda delta: (bool(delta.path) and not delta.token_ids, delta.path),
    )
    return [
        resumed_thread(request, delta, sequences[delta.path], group.remaining_tokens)
        for delta in unfinished
    ]


def thread_sequences(
    journal: Journal, prompt: Sequence[int], parameters: ForkParameters
) -> dict[ThreadPath, list[int]]:
    """Return each thread's whole sequence: prompt, tokens of its ancestors, its own tokens.

    Raises TreeError if a thread comes before its parent, or if its parent did not fork it.
    """
    sequences: dict[ThreadPath, list[int]] = {}
    forks: dict[ThreadPath, list[int]] = {}
    for delta in journal:
        if not delta.path:
            before = list(prompt)
        else:
            *parent_path, ordinal = delta.path
            parent_forks = forks.get(tuple(parent_path), [])
            if ordinal >= len(parent_forks):
                raise TreeError(f"no thread before {delta.path} has forked it")
            parent = sequences[tuple(parent_path)]
            inherited = parent[: parameters.num_inherited(parent_forks[ordinal])]
            before = [*inherited, *parameters.seed_ids]
        forks[delta.path] = [
            len(before) + index
            for index, token_id in enumerate(delta.token_ids)
            if token_id == parameters.fork_id
        ]
        sequences[delta.path] = [*before, *delta.token_ids]
    return sequences


def resumed_thread(
    request: Request, delta: ThreadDelta, sequence: list[int], max_tokens: int
) -> Request:
    """Return the request of one thread; `request` is the client's, with the root's parameters."""
    if request.sampling_params is None:
        raise TreeError(f"request {request.request_id!r} does not sample tokens")
    params = copy(request.sampling_params)
    params.max_tokens = max_tokens
    params.skip_reading_prefix_cache = False
    params.seed = _resumed_seed(params.seed, delta)
    if params.extra_args and EXTRA_ARG in params.extra_args:
        _set_parameters(params, thread_path=delta.path)
    arrival_time = request.arrival_time
    for _ in delta.path:
        arrival_time = _behind(arrival_time)
    return Request(
        request_id=thread_request_id(request.request_id, delta.path),
        prompt_token_ids=sequence,
        sampling_params=params,
        pooling_params=None,
        client_index=request.client_index,
        arrival_time=arrival_time,
        mm_features=request.mm_features,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
        priority=request.priority,
        trace_headers=None if delta.path else request.trace_headers,
        block_hasher=block_hasher(request),
    )


def _prompt(request: Request) -> list[int]:
    if request.prompt_token_ids is None or request.sampling_params is None:
        raise TreeError(f"request {request.request_id!r} has no prompt tokens to resume from")
    return request.prompt_token_ids


def _behind(parent_arrival_time: float) -> float:
    """Return the next larger time, which is after the parent and before every later request."""
    return math.nextafter(parent_arrival_time, math.inf)


def end_forks(thread: Request) -> None:
    """Let a thread fork no more, also if it is preempted and sent to the workers again."""
    if thread.sampling_params is not None:
        # The choices of one request may share these.
        thread.sampling_params = copy(thread.sampling_params)
        _set_parameters(thread.sampling_params, enabled=False)


def _set_parameters(params: SamplingParams, **values: Any) -> None:
    """Change some of a thread's `ForkParameters`."""
    # A copy: threads share what their parameters hold.
    extra_args = params.extra_args or {}
    values = {**extra_args[EXTRA_ARG], **values}
    params.extra_args = {**extra_args, EXTRA_ARG: values}
    if values["thread_path"] and not values["children_fork"]:
        fork_id = values["fork_id"]
        # With speculative decoding, bad words replace our logits processor.
        if [fork_id, fork_id] in bad_words_of(params):
            add_bad_words(params, [[fork_id]])


def _resumed_seed(seed: int | None, delta: ThreadDelta) -> int | None:
    """Return a seed for the rest of a thread, so that no random number is drawn twice.

    The numbers differ from those of an uninterrupted run: the state of the lost generator is
    unknown.
    """
    for ordinal in delta.path:
        seed = child_seed(seed, ordinal)
    return derived_seed(seed, f"+{len(delta.token_ids)}") if delta.token_ids else seed
