"""Threads of a request whose threads wait for their children, rebuilt from its journal.

The journal has what each thread has generated. Blocks, seeds and joined texts follow from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from apar_core.errors import TreeError
from apar_core.fork_parameters import ForkParameters
from apar_core.formats.blocks import (
    BlockRules,
    JoinPoint,
    OpenBlock,
    OpenForks,
    split_at_blocks,
    split_at_forks,
)
from apar_core.journal import EndReason, Journal, ThreadDelta
from apar_core.tree.thread_names import ThreadPath


@dataclass(slots=True)
class RebuiltThread:
    """A thread and the sequence that its next engine request continues.

    own_start: tokens before its own text. segment_start: tokens before what it has generated since
        its last join.
    num_children: children of all its blocks. waits_for: its last block, if nothing was joined yet,
        and first_child: the first of that block's children.
    blocks: for each block, how many tokens it had generated, and which children it waited for.
    forks: children that it has not joined yet, where a parent joins.
    """

    delta: ThreadDelta
    sequence: list[int]
    own_start: int
    segment_start: int
    num_children: int = 0
    waits_for: OpenBlock | None = None
    first_child: int = 0
    blocks: list[tuple[int, range]] = field(default_factory=list)
    forks: OpenForks | None = None

    def own_text(self, parameters: ForkParameters) -> tuple[int, ...]:
        """Return what it has written so far, without an end token of the model."""
        own = self.sequence[self.own_start :]
        return tuple(own[:-1] if parameters.ended_itself(own, stopped=self.delta.stopped) else own)

    @property
    def child_paths(self) -> list[ThreadPath]:
        """Paths of the children that it waits for."""
        if self.waits_for is None:
            return []
        end = self.first_child + len(self.waits_for.children)
        return [(*self.delta.path, ordinal) for ordinal in range(self.first_child, end)]


def rebuilt_threads(
    journal: Journal, prompt: Sequence[int], rules: BlockRules, parameters: ForkParameters
) -> dict[ThreadPath, RebuiltThread]:
    """Return all threads by path, also children that the journal does not know yet.

    Raises TreeError for a thread that no other one has opened.
    """
    deltas = {delta.path: delta for delta in journal}
    known: dict[ThreadPath, int] = {}
    for path in deltas:
        if path:
            known[path[:-1]] = max(known.get(path[:-1], 0), path[-1] + 1)
    threads: dict[ThreadPath, RebuiltThread] = {}

    def rebuild(path: ThreadPath, before: list[int]) -> RebuiltThread:
        delta = deltas.get(path) or ThreadDelta(path, ())
        thread = RebuiltThread(delta, list(before), len(before), len(before))
        threads[path] = thread
        start = 0
        has_ended = delta.finish_reason is not None
        events: Iterator[tuple[int, OpenBlock | JoinPoint]] = iter(())
        if rules.joins_later and not path:
            thread.forks = OpenForks(rules)
            events = split_at_forks(
                thread.forks,
                delta.token_ids,
                has_ended=has_ended,
                stopped=delta.stopped,
                num_children=known.get(path, 0),
            )
        elif rules.nests or not path:
            events = split_at_blocks(
                rules,
                delta.token_ids,
                lambda: prompt,
                has_ended=has_ended,
                num_children=known.get(path, 0),
            )
        for end, event in events:
            _join(thread, threads, rules, parameters)
            thread.sequence += delta.token_ids[start:end]
            start = end
            if isinstance(event, JoinPoint):
                _wait(thread, event.block, event.ordinal, end)
                continue
            first_child = thread.num_children
            for child in event.children:
                inherited: list[int] = []
                if event.num_inherited is not None:
                    inherited = thread.sequence[: thread.segment_start + event.num_inherited]
                rebuild((*path, thread.num_children), [*inherited, *child.seed])
                thread.num_children += 1
            if thread.forks is None:
                _wait(thread, event, first_child, end)
            else:
                thread.blocks.append((end, range(0)))
        if start < len(delta.token_ids):
            _join(thread, threads, rules, parameters)
            thread.sequence += delta.token_ids[start:]
        return thread

    rebuild((), list(prompt))
    if unknown := deltas.keys() - threads.keys():
        raise TreeError(f"no thread before {min(unknown)} has opened it")
    return {path: threads[path] for path in sorted(threads)}


def _wait(thread: RebuiltThread, block: OpenBlock, first_child: int, end: int) -> None:
    """Let a thread wait for the children of a block after so many generated tokens."""
    thread.waits_for, thread.first_child = block, first_child
    thread.blocks.append((end, range(first_child, first_child + len(block.children))))


def _join(
    thread: RebuiltThread,
    threads: dict[ThreadPath, RebuiltThread],
    rules: BlockRules,
    parameters: ForkParameters,
) -> None:
    """Append the joined text of the block that a thread waits for, if any."""
    block, paths = thread.waits_for, thread.child_paths
    if block is None:
        return
    generated = thread.sequence[thread.segment_start :]
    joined = rules.joined(block, generated, ended_texts(paths, threads, rules, parameters))
    del thread.sequence[thread.segment_start + joined.num_kept :]
    thread.sequence += joined.token_ids
    thread.segment_start = len(thread.sequence)
    thread.waits_for = None


def ended_texts(
    paths: Sequence[ThreadPath],
    threads: dict[ThreadPath, RebuiltThread],
    rules: BlockRules,
    parameters: ForkParameters,
) -> list[tuple[int, ...]]:
    """Return the texts of threads that have ended, some of them at their own last join."""
    for path in paths:
        _join(threads[path], threads, rules, parameters)
    return [threads[path].own_text(parameters) for path in paths]


def completed_blocks(
    journal: Journal,
    prompt: Sequence[int],
    rules: BlockRules,
    parameters: ForkParameters,
    *,
    max_tokens: int | None,
    max_model_len: int,
) -> Journal:
    """Return a journal with an entry for every child, and the ends that no step would bring.

    The lost engine may not have reported its last decisions: which children opened, and whether a
    parent continues after its children. They are made here by the scheduler's rules.
    """
    threads = rebuilt_threads(journal, prompt, rules, parameters)
    if threads[()].forks is not None and threads[()].delta.finish_reason is not None:
        # The children that it has not joined were cancelled.
        threads = {
            path: thread
            for path, thread in threads.items()
            if not path or thread.delta.finish_reason is not None
        }
    known = {delta.path for delta in journal}
    num_opened = sum(
        bool(path) and path in known and not thread.delta.was_refused
        for path, thread in threads.items()
    )
    deltas = {path: thread.delta for path, thread in threads.items()}
    for path, thread in threads.items():
        if path and path not in known:
            opens = len(thread.sequence) < max_model_len and num_opened < parameters.max_forks
            num_opened += opens
            deltas[path] = ThreadDelta(path, (), None if opens else EndReason.LENGTH)
    used = sum(
        parameters.num_text(delta.token_ids, stopped=delta.stopped) for delta in deltas.values()
    )
    is_exhausted = max_tokens is not None and used >= max_tokens
    # Inner blocks first: their end may be what an outer one waits for.
    for path in sorted(deltas, reverse=True):
        delta, thread = deltas[path], threads[path]
        if delta.finish_reason is not None:
            continue
        reason = (
            EndReason.LENGTH
            if is_exhausted
            else _end_at_join(thread, threads, deltas, rules, parameters, max_model_len)
        )
        if reason is not None:
            deltas[path] = delta._replace(finish_reason=reason)
    return tuple(deltas.values())


def _end_at_join(
    thread: RebuiltThread,
    threads: dict[ThreadPath, RebuiltThread],
    deltas: dict[ThreadPath, ThreadDelta],
    rules: BlockRules,
    parameters: ForkParameters,
    max_model_len: int,
) -> int | None:
    """Return the reason for which a parent ends at its join; None if it waits or continues."""
    paths, block = thread.child_paths, thread.waits_for
    if block is None or any(deltas[path].finish_reason is None for path in paths):
        return None
    texts = ended_texts(paths, threads, rules, parameters)
    joined = rules.joined(block, thread.sequence[thread.segment_start :], texts)
    if not joined.continues:
        return EndReason.STOP
    num_tokens = thread.segment_start + joined.num_kept + len(joined.token_ids)
    return EndReason.LENGTH if num_tokens >= max_model_len else None
