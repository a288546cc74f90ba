"""Takes up a request where another engine had to leave it: every thread becomes a prompt again.

A thread is a prompt: what its path holds so far. So a thread of the journal continues as a new
request of the engine, whose prompt is the client's prompt and all that the thread has read and
generated. Nothing is generated again; what its threads share is computed once, through the prefix
cache.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from apar_core.errors import TreeError
from apar_core.fork_parameters import EXTRA_ARG, ForkParameters, child_seed
from apar_core.journal import Journal, ThreadDelta, from_plain
from apar_core.scheduler.thread_table import ThreadGroup
from apar_core.tree.thread_names import thread_request_id

RESUME_ARG = "apar_resume"
"""Key of `SamplingParams.extra_args` under which a journal reaches the scheduler, as plain values.

It holds every thread that a fork token names, parents before their children."""

Path = tuple[int, ...]


def take_journal(params: SamplingParams | None) -> Journal | None:
    """The journal that a request shall go on from, removed from its parameters; None for a new one.

    What remains goes to the workers with every thread.
    """
    if params is None or not params.extra_args or RESUME_ARG not in params.extra_args:
        return None
    extra_args = dict(params.extra_args)
    values = extra_args.pop(RESUME_ARG)
    params.extra_args = extra_args
    return from_plain(values)


def forget_journal(params: SamplingParams | None) -> None:
    """Drop what a client may have put where a journal goes."""
    if params is not None and params.extra_args and RESUME_ARG in params.extra_args:
        params.extra_args = {k: v for k, v in params.extra_args.items() if k != RESUME_ARG}


def resumed_alone(request: Request, journal: Journal) -> Request:
    """A request that may not fork, behind what it has generated so far."""
    (root,) = journal
    tokens = [*_prompt(request), *root.token_ids]
    return _thread(request, root, tokens, request.max_tokens - len(root.token_ids))


def resumed_threads(
    request: Request, journal: Journal, group: ThreadGroup[Request]
) -> list[Request]:
    """The unfinished threads of a forked request; sets the counts of its group.

    Those that had generated something come first, in order of their paths.
    """
    parameters = group.parameters
    for delta in journal:
        group.count_text(delta.token_ids, ended=ended_itself(delta, parameters.end_ids))
        group.num_forks += bool(delta.path) and not was_refused(delta)
        group.num_children[thread_request_id(group.root_id, delta.path)] = delta.token_ids.count(
            parameters.fork_id
        )
    sequences = thread_sequences(journal, _prompt(request), parameters)
    unfinished = sorted(
        (delta for delta in journal if delta.finish_reason is None),
        key=lambda delta: (bool(delta.path) and not delta.token_ids, delta.path),
    )
    return [
        _thread(request, delta, sequences[delta.path], group.remaining_tokens)
        for delta in unfinished
    ]


def ended_itself(delta: ThreadDelta, end_ids: Sequence[int]) -> bool:
    """Whether a thread's last token is an end-of-thread token of the model."""
    if delta.finish_reason != FinishReason.STOP or not delta.token_ids:
        return False
    return delta.token_ids[-1] in end_ids


def thread_sequences(
    journal: Journal, prompt: Sequence[int], parameters: ForkParameters
) -> dict[Path, list[int]]:
    """Each thread's whole sequence, by its path: prompt, its ancestors' tokens, its own.

    Raises TreeError if a thread stands before its parent, or if its parent did not fork it.
    """
    sequences: dict[Path, list[int]] = {}
    forks: dict[Path, list[int]] = {}
    for delta in journal:
        if not delta.path:
            before = list(prompt)
        else:
            *parent_path, ordinal = delta.path
            parent_forks = forks.get(tuple(parent_path), [])
            if ordinal >= len(parent_forks):
                raise TreeError(f"no thread before {delta.path} has forked it")
            parent = sequences[tuple(parent_path)]
            before = [*parent[: parent_forks[ordinal] + 1], parameters.child_id]
        forks[delta.path] = [
            len(before) + index
            for index, token_id in enumerate(delta.token_ids)
            if token_id == parameters.fork_id
        ]
        sequences[delta.path] = [*before, *delta.token_ids]
    return sequences


def was_refused(delta: ThreadDelta) -> bool:
    """Whether a fork opened no thread: its child then ends by length before any token."""
    return delta.finish_reason == FinishReason.LENGTH and not delta.token_ids


def _prompt(request: Request) -> list[int]:
    if request.prompt_token_ids is None or request.sampling_params is None:
        raise TreeError(f"request {request.request_id!r} has no prompt tokens to resume from")
    return request.prompt_token_ids


def _thread(request: Request, delta: ThreadDelta, sequence: list[int], max_tokens: int) -> Request:
    """The engine's request for one thread; `request` is the client's, as the root thread's."""
    if request.sampling_params is None:
        raise TreeError(f"request {request.request_id!r} does not sample tokens")
    params = request.sampling_params.clone()
    params.max_tokens = max_tokens
    params.skip_reading_prefix_cache = False
    params.seed = _resumed_seed(params.seed, delta)
    params.extra_args = _extra_args(params.extra_args, delta.path)
    arrival_time = request.arrival_time
    for _ in delta.path:
        # The next larger time: behind its parent, ahead of every later request.
        arrival_time = math.nextafter(arrival_time, math.inf)
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
        block_hasher=request._block_hasher,
    )


def _extra_args(extra_args: dict[str, Any] | None, path: Path) -> dict[str, Any] | None:
    if not extra_args or EXTRA_ARG not in extra_args:
        return extra_args
    return {**extra_args, EXTRA_ARG: {**extra_args[EXTRA_ARG], "thread_path": path}}


def _resumed_seed(seed: int | None, delta: ThreadDelta) -> int | None:
    """Seed of a thread from here on, so that no random number is drawn twice in an answer.

    They are others than those of an uninterrupted run: how far a generator had come, nobody knows.
    """
    for ordinal in delta.path:
        seed = child_seed(seed, ordinal)
    if seed is None or not delta.token_ids:
        return seed
    digest = hashlib.blake2b(f"{seed}+{len(delta.token_ids)}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
