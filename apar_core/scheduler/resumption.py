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

from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from apar_core.errors import TreeError
from apar_core.fork_parameters import EXTRA_ARG, ForkParameters, child_seed, thread_request_id
from apar_core.journal import Journal, ThreadDelta, from_plain
from apar_core.scheduler.thread_table import ThreadGroup

RESUME_ARG = "apar_resume"
"""Key of `SamplingParams.extra_args` under which a journal reaches the scheduler, as plain values.

It holds every thread that a fork token names, parents before their children."""

Path = tuple[int, ...]


def take_journal(request: Request) -> Journal | None:
    """The journal that a request shall go on from, removed from its parameters; None for a new one.

    What remains goes to the workers with every thread.
    """
    params = request.sampling_params
    if params is None or not params.extra_args or RESUME_ARG not in params.extra_args:
        return None
    extra_args = dict(params.extra_args)
    journal = from_plain(extra_args.pop(RESUME_ARG))
    params.extra_args = extra_args
    return journal


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
        ended = delta.finish_reason == FinishReason.STOP and bool(delta.token_ids)
        group.count_text(
            delta.token_ids, ended=ended and delta.token_ids[-1] in parameters.end_ids
        )
        group.num_forks += bool(delta.path) and not _was_refused(delta)
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


def thread_sequences(
    journal: Journal, prompt: Sequence[int], parameters: ForkParameters
) -> dict[Path, list[int]]:
    """Each thread's whole sequence, by its path: prompt, its ancestors' tokens, its own.

    Raises TreeError if a thread stands before its parent, or if its parent did not fork it.
    """
    sequences: dict[Path, list[int]] = {}
    for delta in journal:
        if not delta.path:
            sequences[()] = [*prompt, *delta.token_ids]
            continue
        parent = sequences.get(delta.path[:-1])
        if parent is None:
            raise TreeError(f"thread {delta.path} stands before its parent")
        fork_index = _fork_index(parent, delta.path[-1], parameters, start=_own_start)
        sequences[delta.path] = [*parent[: fork_index + 1], parameters.child_id, *delta.token_ids]
    return sequences
