"""Takes up, in the API process, a request that another engine had to leave.

Its threads' outputs so far go through the output processor once more, so that the answer begins
with all that is known of it; the scheduler gets the same journal and goes on behind it.
"""

from __future__ import annotations

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.request import Request

from apar_core.engine.journal import stop_reason
from apar_core.engine.replay import without_generated
from apar_core.fork_parameters import ForkParameters
from apar_core.journal import Journal, ThreadDelta, to_plain
from apar_core.scheduler.resumption import RESUME_ARG, ended_itself, thread_sequences, was_refused
from apar_core.tree.thread_names import thread_request_id

Path = tuple[int, ...]
# The API process has the one kind, the scheduler and its tests have the other.
AnyRequest = EngineCoreRequest | Request
_LENGTH = int(FinishReason.LENGTH)


def hand_to_scheduler(request: AnyRequest, journal: Journal) -> None:
    """Write a journal into a request's parameters, where the scheduler looks for it."""
    params = request.sampling_params
    if params is not None:
        extra_args = without_generated(params.extra_args or {}, journal)
        params.extra_args = {**extra_args, RESUME_ARG: to_plain(journal)}


def outputs_so_far(request: AnyRequest, journal: Journal) -> list[EngineCoreOutput]:
    """What the engine would have put out for a journal; nothing for threads without an event."""
    return [
        EngineCoreOutput(
            thread_request_id(request.request_id, delta.path),
            list(delta.token_ids),
            finish_reason=(
                None if delta.finish_reason is None else FinishReason(delta.finish_reason)
            ),
            stop_reason=_stop_reason(request, delta),
        )
        for delta in journal
        if delta.token_ids or delta.finish_reason is not None
    ]


def completed(request: AnyRequest, journal: Journal, max_model_len: int) -> Journal:
    """A merged journal with every thread that its fork tokens name, as the scheduler wants it.

    The other engine died with some decisions untold. They are made here by its rules: a fork
    without room in the context or beyond `max_forks` opens no thread, and once the request has
    used up its tokens all its threads end; each such thread ends by length.
    """
    root = ThreadDelta((), ())
    journal = journal if journal and not journal[0].path else (root, *journal)
    params = request.sampling_params
    parameters = None if params is None else ForkParameters.from_extra_args(params.extra_args)
    if params is None or parameters is None or not parameters.enabled:
        return journal[:1]
    threads = {delta.path: delta for delta in journal}
    _add_children(threads, parameters, request.prompt_token_ids or [], max_model_len)
    used = sum(_num_text(delta, parameters) for delta in threads.values())
    exhausted = params.max_tokens is not None and used >= params.max_tokens
    return tuple(
        ThreadDelta(path, threads[path].token_ids, _LENGTH)
        if exhausted and threads[path].finish_reason is None
        else threads[path]
        for path in sorted(threads)
    )


def _add_children(
    threads: dict[Path, ThreadDelta],
    parameters: ForkParameters,
    prompt: list[int],
    max_model_len: int,
) -> None:
    """Add the threads that fork tokens name and that have not been heard of yet."""
    opened = sum(bool(path) and not was_refused(delta) for path, delta in threads.items())
    sequences = thread_sequences(tuple(threads.values()), prompt, parameters)
    for parent in list(threads.values()):
        first = len(sequences[parent.path]) - len(parent.token_ids)
        forks = [i for i, token in enumerate(parent.token_ids) if token == parameters.fork_id]
        for ordinal, index in enumerate(forks):
            path = (*parent.path, ordinal)
            if path in threads:
                continue
            has_room = first + index + 2 < max_model_len
            opens = has_room and opened < parameters.max_forks
            opened += opens
            threads[path] = ThreadDelta(path, (), None if opens else _LENGTH)


def _num_text(delta: ThreadDelta, parameters: ForkParameters) -> int:
    control = (parameters.fork_id, parameters.child_id)
    num_text = sum(token_id not in control for token_id in delta.token_ids)
    return num_text - ended_itself(delta, parameters.end_ids)


def _stop_reason(request: AnyRequest, delta: ThreadDelta) -> int | None:
    if delta.finish_reason != FinishReason.STOP or request.sampling_params is None:
        return None
    return stop_reason(request.sampling_params, delta.token_ids)
