"""Threads of a request whose threads wait for the children that they open (`formats/blocks.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apar_core.engine.thread_outputs import RequestThreads, plain_token
from apar_core.fork_parameters import ForkParameters
from apar_core.formats.blocks import BlockRules, JoinPoint, OpenBlock, OpenForks
from apar_core.tree.block_statistics import block_statistics
from apar_core.tree.statistics import TreeStatistics
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId, child_request_id, child_thread
from apar_core.vllm_names import EngineCoreOutput, FinishReason


class BlockThreads(RequestThreads):
    """Reads the text that the format prescribes from the threads of one request.

    The format's own text around the children is forced into the tree: a header before each child,
    what closes a child that did not close itself, and what its parent continues after. The last of
    these comes with the first token after it, because a parent may also end there.

    `prompt` are the tokens of the client's prompt.
    """

    def __init__(
        self,
        request_id: str,
        parameters: ForkParameters,
        rules: BlockRules,
        prompt: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(request_id, parameters, None, *args, **kwargs)
        self.rules = rules
        self._prompt = prompt
        self._control_ids = rules.marker_ids
        # Children that the root has not joined, where a parent joins.
        self._forks = OpenForks(rules) if rules.joins_later else None
        # By waiting thread: its block, its own tokens before it, and its children.
        self._waiting: dict[ThreadId, tuple[OpenBlock, list[int], list[ThreadId]]] = {}
        # Items of a thread's current paragraph that it has not generated.
        self._num_forced: dict[ThreadId, int] = {}

    def feed(self, output: EngineCoreOutput) -> Sequence[str]:
        """Add one thread's output; return the engine request ids of its new children."""
        if self._is_discarded(output):
            return []
        if self._waiting and output.new_token_ids and not self.tree.finished:
            self._join(self._threads[output.request_id])
        return super().feed(output)

    def _feed_tokens(self, thread: ThreadId, output: EngineCoreOutput, *, ended: bool) -> list[str]:
        """Add the tokens of one output; return the engine request ids of its new children."""
        token_ids = output.new_token_ids
        num_text = len(token_ids) - ended
        rules = self.rules
        opens = thread == ROOT_THREAD or rules.nests
        children: list[str] = []
        start = 0
        for index in range(num_text):
            # Several blocks come in one output where it is replayed.
            if index == start:
                self._join(thread)
            if not opens or token_ids[index] not in rules.marker_ids:
                continue
            # The token with which a thread ends opens no block.
            if output.finish_reason is not None and index == len(token_ids) - 1:
                break
            generated = [*self._generated(thread), *token_ids[start : index + 1]]
            event = (
                rules.open(generated, lambda: self._prompt)
                if self._forks is None
                else self._forks.read(generated)
            )
            if isinstance(event, JoinPoint):
                self._append(thread, output, start, index + 1)
                start = index + 1
                self._wait_for(thread, event, generated)
            elif event is not None:
                self._append(thread, output, start, index + 1)
                start = index + 1
                children += self._open(output.request_id, thread, event, generated)
        if start < len(token_ids):
            # An end token may be all that a thread generates after a join.
            self._join(thread)
        self._append(thread, output, start, num_text)
        return children

    def statistics(self, num_prompt_tokens: int) -> TreeStatistics:
        """Return what waiting and joining saved and cost."""
        return block_statistics(
            self.tree, num_prompt_tokens, reads_children=self.rules.shows_children
        )

    def forked_at(self, child: ThreadId) -> int:
        """Return how many tokens its parent had generated when it opened a child's block."""
        if self._forks is not None:
            return self.tree.threads[child].fork_index
        parent = self.tree.threads[self.tree.threads[child].parent or ROOT_THREAD]
        ordinal = parent.children.index(child)
        block = next(each for each in reversed(parent.blocks) if each.first_child <= ordinal)
        return block.num_generated

    def _finish(self, thread: ThreadId, output: EngineCoreOutput, *, ended: bool) -> None:
        self._waiting.pop(thread, None)
        # A stop token of the client ends the whole answer.
        stops = not ended and isinstance(output.stop_reason, int)
        is_cut = stops or output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        if thread != ROOT_THREAD and not is_cut:
            items = self.tree.threads[thread].current_node.items
            text = [items[-1].token_id] if items else []
            self.tree.close_child(
                thread,
                [plain_token(t) for t in self.rules.closing(text)],
                is_closed=any(map(self.rules.ends_child, text)),
            )
        super()._finish(thread, output, ended=ended)
        if thread == ROOT_THREAD and self._forks is not None:
            self._end_children()

    def _end_children(self) -> None:
        """Remove the children that an ended root has not joined; the scheduler cancels them."""
        for child in self.tree.threads[ROOT_THREAD].children:
            record = self.tree.threads[child]
            if record.is_apart:
                self.tree.discard(child)
                if self.tags is not None:
                    self.tags.discard(child)
            elif not record.finished:
                self.tree.finish(child, ended=False)

    def _generated(self, thread: ThreadId) -> list[int]:
        """Return what a thread has generated since its last join."""
        items = self.tree.threads[thread].current_node.items
        return [item.token_id for item in items[self._num_forced.get(thread, 0) :]]

    def _open(
        self, request_id: str, thread: ThreadId, block: OpenBlock, generated: list[int]
    ) -> list[str]:
        """Open a block; return the engine request ids of its children."""
        first = len(self.tree.threads[thread].children)
        ordinals = range(first, first + len(block.children))
        names = [child_thread(thread, ordinal) for ordinal in ordinals]
        headers = [[plain_token(t) for t in child.header] for child in block.children]
        seeds = [len(child.seed) for child in block.children]
        if self._forks is None:
            self.tree.open_block(thread, names, seeds, headers)
            self._waiting[thread] = (block, generated, names)
            self._num_forced[thread] = 0
        else:
            for name, seed, header in zip(names, seeds, headers, strict=True):
                self.tree.fork_apart(thread, name, seed, header)
        request_ids = [child_request_id(request_id, ordinal) for ordinal in ordinals]
        for name, child_id in zip(names, request_ids, strict=True):
            self._threads[child_id] = name
            if self.follower is not None:
                self.follower.forked(request_id, child_id)
        return request_ids

    def _wait_for(self, thread: ThreadId, point: JoinPoint, generated: list[int]) -> None:
        """Let a thread wait for a child that it has forked before."""
        self.tree.attach(thread, point.ordinal)
        child = self.tree.threads[thread].children[point.ordinal]
        self._waiting[thread] = (point.block, generated, [child])
        self._num_forced[thread] = 0

    def _join(self, thread: ThreadId) -> None:
        """Add the format's text after the children of a thread that continues."""
        if thread not in self._waiting:
            return
        block, generated, children = self._waiting.pop(thread)
        suffix = self.rules.suffix_ids
        if not self.rules.shows_children:
            # Such children open no blocks, so each has one paragraph.
            nodes = [self.tree.threads[child].current_node for child in children]
            texts = [[item.token_id for item in node.items] for node in nodes]
            suffix = self.rules.joined(block, generated, texts).token_ids
        self.tree.join(thread, [plain_token(token_id) for token_id in suffix])
        self._num_forced[thread] = len(suffix)
