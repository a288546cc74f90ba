"""Threads of a request whose lists are written in parallel, rebuilt from its journal.

The journal has what each thread has generated, and everything else follows from it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from apar_core.errors import TreeError
from apar_core.fork_parameters import ForkParameters
from apar_core.formats.lists import (
    HeadThread,
    ListBlock,
    ListEnd,
    ListReader,
    ListRules,
    NextItem,
    RootThread,
)
from apar_core.journal import EndReason, Journal, ThreadDelta
from apar_core.tree.thread_names import ThreadPath
from apar_core.vllm_names import EngineCoreRequest, Request


@dataclass(slots=True)
class RebuiltListThread:
    """A thread and the sequence that its next engine request continues.

    own_start, segment_start: as in `TextPlace`. waits: whether it is the root and waits for an
    item. blocks: how many tokens it had generated when it opened each block.
    """

    delta: ThreadDelta
    sequence: list[int]
    own_start: int
    segment_start: int
    reader: ListReader
    num_children: int = 0
    waits: bool = False
    blocks: list[int] = field(default_factory=list)

    def own(self, parameters: ForkParameters) -> tuple[list[int], bool]:
        """Return its own tokens without an end token, and whether it has ended with one."""
        own = list(self.delta.token_ids)
        itself = parameters.ended_itself(own, stopped=self.delta.stopped)
        return (own[:-1], True) if itself else (own, False)

    def num_text(self, parameters: ForkParameters) -> int:
        """Return how many of the tokens that it has generated are text, as far as is known."""
        own, _ = self.own(parameters)
        return len(own) if self.delta.finish_reason is None else self.reader.num_text(len(own))


@dataclass(slots=True)
class RebuiltLists:
    """Threads by path, without those after the ends of lists; `heads` as in `ListGroup`."""

    threads: dict[ThreadPath, RebuiltListThread] = field(default_factory=dict)
    heads: dict[int, ThreadPath] = field(default_factory=dict)
    num_kept: int = 0
    cancelled: set[ThreadPath] = field(default_factory=set)

    def cancel_after(self, number: int) -> None:
        """Leave out the threads of all items after one, with which their list ends."""
        first = self.heads.get(number + 1)
        self.heads = {}
        if first is None:
            return
        self.cancelled.add(first)
        for path in [each for each in self.threads if each[: len(first)] == first]:
            del self.threads[path]


def rebuilt_lists(
    journal: Journal,
    prompt: Sequence[int],
    rules: ListRules,
    parameters: ForkParameters,
    stop_ids: Container[int],
) -> RebuiltLists:
    """Return all threads, also children that the journal does not know yet.

    `stop_ids` are the client's stop tokens.
    Raises TreeError for a thread that no other one has opened.
    """
    deltas = {delta.path: delta for delta in journal}
    rebuilt = RebuiltLists()

    def rebuild(path: ThreadPath, before: list[int], reader: ListReader) -> None:
        delta = deltas.get(path) or ThreadDelta(path, ())
        thread = RebuiltListThread(delta, before, len(before), len(before), reader)
        rebuilt.threads[path] = thread
        own, itself = thread.own(parameters)
        for index, token_id in enumerate(own, 1):
            if thread.waits:
                _join(thread, rebuilt, rules)
            thread.sequence.append(token_id)
            is_last = delta.finish_reason is not None and index == len(delta.token_ids)
            was_shown = delta.stopped and token_id not in stop_ids
            mark = reader.read(token_id, stopped=is_last and not (path and was_shown))
            if isinstance(mark, ListBlock):
                rebuild_children(thread, mark, index)
            if isinstance(mark, NextItem):
                rebuilt.num_kept = 0
            elif isinstance(mark, ListEnd):
                rebuilt.cancel_after(mark.number)
            thread.waits = not path and isinstance(mark, ListBlock | NextItem)
        if itself:
            if thread.waits:
                _join(thread, rebuilt, rules)
            thread.sequence.append(delta.token_ids[-1])
        if delta.finish_reason is not None:
            reader.ends(own, refused=delta.was_refused)
            if isinstance(reader, RootThread) and reader.run is not None:
                rebuilt.cancel_after(reader.run.number)

    def rebuild_children(thread: RebuiltListThread, block: ListBlock, num_tokens: int) -> None:
        path = thread.delta.path
        thread.blocks.append(num_tokens)
        if not path:
            rebuilt.num_kept, rebuilt.heads = block.num_inherited or 0, {}
        sequence = list(thread.sequence)
        readers = rules.child_readers(block)
        inherited = block.inherited(thread.segment_start)
        for child, number, reader in zip(block.children, inherited, readers, strict=True):
            child_path = (*path, thread.num_children)
            thread.num_children += 1
            if isinstance(reader, HeadThread):
                rebuilt.heads[reader.number] = child_path
            rebuild(child_path, [*sequence[:number], *child.seed], reader)

    rebuild((), list(prompt), rules.root_reader(prompt))
    for path in deltas.keys() - rebuilt.threads.keys():
        if not any(path[: len(first)] == first for first in rebuilt.cancelled):
            raise TreeError(f"no thread before {path} has opened it")
    return rebuilt


def stop_ids_of(request: Request | EngineCoreRequest) -> Container[int]:
    """Return the stop tokens of a request's client."""
    params = request.sampling_params
    return () if params is None else params.stop_token_ids or ()


def _join(thread: RebuiltListThread, rebuilt: RebuiltLists, rules: ListRules) -> None:
    """Let the root continue after the item that it has waited for."""
    thread.waits = False
    reader = thread.reader
    run = reader.run if isinstance(reader, RootThread) else None
    if run is None or not run.gives_item:
        return
    del thread.sequence[thread.segment_start + rebuilt.num_kept :]
    thread.sequence += rules.item_tokens(run, run.number)
    thread.segment_start = len(thread.sequence)


def completed_lists(
    journal: Journal,
    prompt: Sequence[int],
    rules: ListRules,
    parameters: ForkParameters,
    stop_ids: Container[int],
    *,
    max_tokens: int | None,
    max_model_len: int,
) -> Journal:
    """Return a journal with an entry for every child, and the ends that no step would bring.

    The lost engine may not have reported its last decisions: which children opened, and whether the
    root continues. They are made here by the scheduler's rules.
    """
    rebuilt = rebuilt_lists(journal, prompt, rules, parameters, stop_ids)
    known = {delta.path for delta in journal}
    num_opened = sum(
        bool(path) and path in known and not thread.delta.was_refused
        for path, thread in rebuilt.threads.items()
    )
    used = sum(thread.num_text(parameters) for thread in rebuilt.threads.values())
    is_exhausted = max_tokens is not None and used >= max_tokens * rules.work_factor
    deltas: dict[ThreadPath, ThreadDelta] = {}
    for path, thread in sorted(rebuilt.threads.items()):
        delta = thread.delta
        if path and path not in known:
            opens = len(thread.sequence) < max_model_len and num_opened < parameters.max_forks
            num_opened += opens
            delta = ThreadDelta(path, (), None if opens else EndReason.LENGTH)
        if delta.finish_reason is None and (
            is_exhausted or (thread.waits and _is_full(thread, rebuilt, rules, max_model_len))
        ):
            delta = delta._replace(finish_reason=EndReason.LENGTH)
        deltas[path] = delta
    return tuple(deltas.values())


def _is_full(
    thread: RebuiltListThread, rebuilt: RebuiltLists, rules: ListRules, max_model_len: int
) -> bool:
    """Return whether the item that the root waits for fills the context."""
    reader = thread.reader
    run = reader.run if isinstance(reader, RootThread) else None
    if run is None or not run.item(run.number).is_known or not run.gives_item:
        return False
    num_kept = thread.segment_start + rebuilt.num_kept
    return num_kept + len(rules.item_tokens(run, run.number)) >= max_model_len
