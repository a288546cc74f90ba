"""Resume, in the API process, a request whose engine was lost.

The output processor gets the outputs of the journal once more, so that the answer starts with
everything known of it. The scheduler gets the same journal and resumes the unfinished threads
(`apar_core/scheduler/thread_requests.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams

from apar_core.engine.replay import without_generated
from apar_core.fork_parameters import ForkParameters
from apar_core.formats.lists import ListRules
from apar_core.formats.rules import block_rules
from apar_core.journal import EndReason, Journal, ThreadDelta, to_plain
from apar_core.scheduler.block_journal import RebuiltThread, completed_blocks, rebuilt_threads
from apar_core.scheduler.list_journal import (
    RebuiltLists,
    completed_lists,
    rebuilt_lists,
    stop_ids_of,
)
from apar_core.scheduler.thread_requests import RESUME_ARG, thread_sequences
from apar_core.tree.thread_names import ThreadPath, thread_request_id
from apar_core.vllm_names import EngineCoreOutput, EngineCoreRequest, FinishReason, Request

# `EngineCoreRequest` in the API process, `Request` in the scheduler and its tests.
AnyRequest = EngineCoreRequest | Request


def hand_to_scheduler(request: AnyRequest, journal: Journal) -> None:
    """Write a complete journal into the request's parameters, where the scheduler reads it."""
    params = request.sampling_params
    if params is not None:
        extra_args = without_generated(params.extra_args or {}, journal)
        params.extra_args = {**extra_args, RESUME_ARG: to_plain(journal)}


def outputs_so_far(
    request: AnyRequest, journal: Journal, tokenizer: Any = None
) -> list[EngineCoreOutput]:
    """Return the engine's outputs for a journal, at least one for each thread that has any."""
    return [
        EngineCoreOutput(
            thread_request_id(request.request_id, delta.path),
            list(delta.token_ids),
            finish_reason=(
                None if delta.finish_reason is None else FinishReason(delta.finish_reason)
            ),
            stop_reason=(
                stop_reason(request.sampling_params, delta.token_ids)
                if delta.stopped and request.sampling_params is not None
                else None
            ),
        )
        for delta in _in_order(request, journal, tokenizer)
        if delta.token_ids or delta.finish_reason is not None
    ]


def _in_order(request: AnyRequest, journal: Journal, tokenizer: Any) -> Iterator[ThreadDelta]:
    """Yield the deltas, those of children before what their parent generated after them."""
    params = request.sampling_params
    parameters = None if params is None else ForkParameters.from_extra_args(params.extra_args)
    if parameters is None or parameters.blocks is None or not parameters.enabled:
        yield from journal
        return
    rules, prompt = block_rules(parameters.blocks, tokenizer), request.prompt_token_ids or []
    if isinstance(rules, ListRules):
        stop_ids = stop_ids_of(request)
        yield from _lists_in_order(rebuilt_lists(journal, prompt, rules, parameters, stop_ids))
    else:
        yield from _thread_in_order((), rebuilt_threads(journal, prompt, rules, parameters))


def _lists_in_order(rebuilt: RebuiltLists) -> Iterator[ThreadDelta]:
    """Yield the threads of a list before what the root has generated after its second head."""
    root = rebuilt.threads[()]
    children = [(path, each.delta) for path, each in sorted(rebuilt.threads.items()) if path]
    start = 0
    for number, end in enumerate(root.blocks):
        yield ThreadDelta((), root.delta.token_ids[start:end])
        yield from (delta for path, delta in children if path[0] // 2 == number)
        start = end
    yield root.delta._replace(token_ids=root.delta.token_ids[start:])


def _thread_in_order(
    path: ThreadPath, threads: Mapping[ThreadPath, RebuiltThread]
) -> Iterator[ThreadDelta]:
    thread = threads[path]
    delta, start = thread.delta, 0
    unread = set(range(thread.num_children))
    for end, ordinals in thread.blocks:
        yield ThreadDelta(path, delta.token_ids[start:end])
        for ordinal in ordinals:
            yield from _thread_in_order((*path, ordinal), threads)
        unread.difference_update(ordinals)
        start = end
    # Children that it has not joined, where a parent joins.
    for ordinal in sorted(unread):
        yield from _thread_in_order((*path, ordinal), threads)
    yield delta._replace(token_ids=delta.token_ids[start:])


def completed(
    request: AnyRequest, journal: Journal, max_model_len: int, tokenizer: Any = None
) -> Journal:
    """Return a merged journal with an entry for every fork, as the scheduler needs it.

    `tokenizer` is needed for formats whose parent waits.

    The lost engine may not have reported its last decisions. They are made here by the same rules:
    a fork without room in the context or beyond `max_forks` opens no thread, and all threads end
    when the request has used up its tokens. Such threads end by length.
    """
    root = ThreadDelta((), ())
    journal = journal if journal and not journal[0].path else (root, *journal)
    params = request.sampling_params
    parameters = None if params is None else ForkParameters.from_extra_args(params.extra_args)
    if params is None or parameters is None or not parameters.enabled:
        return journal[:1]
    if parameters.blocks is not None:
        rules, prompt = block_rules(parameters.blocks, tokenizer), request.prompt_token_ids or []
        if isinstance(rules, ListRules):
            return completed_lists(
                journal,
                prompt,
                rules,
                parameters,
                stop_ids_of(request),
                max_tokens=params.max_tokens,
                max_model_len=max_model_len,
            )
        return completed_blocks(
            journal,
            prompt,
            rules,
            parameters,
            max_tokens=params.max_tokens,
            max_model_len=max_model_len,
        )
    threads = {delta.path: delta for delta in journal}
    _add_children(threads, parameters, request.prompt_token_ids or [], max_model_len)
    used = sum(
        parameters.num_text(delta.token_ids, stopped=delta.stopped) for delta in threads.values()
    )
    exhausted = params.max_tokens is not None and used >= params.max_tokens
    return tuple(
        ThreadDelta(path, threads[path].token_ids, EndReason.LENGTH)
        if exhausted and threads[path].finish_reason is None
        else threads[path]
        for path in sorted(threads)
    )


def _add_children(
    threads: dict[ThreadPath, ThreadDelta],
    parameters: ForkParameters,
    prompt: list[int],
    max_model_len: int,
) -> None:
    """Add the threads of fork tokens that the lost engine has not reported yet."""
    opened = sum(bool(path) and not delta.was_refused for path, delta in threads.items())
    sequences = thread_sequences(tuple(threads.values()), prompt, parameters)
    for parent in list(threads.values()):
        first = len(sequences[parent.path]) - len(parent.token_ids)
        forks = [i for i, token in enumerate(parent.token_ids) if token == parameters.fork_id]
        for ordinal, index in enumerate(forks):
            path = (*parent.path, ordinal)
            if path in threads:
                continue
            has_room = parameters.num_read(first + index) < max_model_len
            opens = has_room and opened < parameters.max_forks
            opened += opens
            threads[path] = ThreadDelta(path, (), None if opens else EndReason.LENGTH)


def stop_reason(params: SamplingParams, token_ids: Sequence[int]) -> int | None:
    """Return the stop token that vLLM reports for a stopped thread, as in its `check_stop`.

    The model's first end token is not reported.
    """
    last = token_ids[-1] if token_ids else None
    if last is None or last == params.eos_token_id:
        return None
    return last if last in (params.stop_token_ids or ()) else None
