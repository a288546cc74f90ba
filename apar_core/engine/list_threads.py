"""Threads of a request whose lists are written in parallel (`formats/lists.py`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apar_core.engine.thread_outputs import RequestThreads, TextToken, plain_token
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
from apar_core.tree.paragraph import ParagraphNode
from apar_core.tree.statistics import CachedChange, TreeStatistics, attended_by, largest_cached
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId, child_request_id, child_thread
from apar_core.vllm_names import EngineCoreOutput, FinishReason


@dataclass(slots=True)
class _Progress:
    """A thread in the schedule in which every live thread gains one token per step.

    step: of its last token. num_before: tokens before its next token, without the prompt.
    num_held: tokens that only it holds. num_generated: tokens that it has generated.
    forked_at: how many its parent had generated at the fork.
    """

    step: int
    num_before: int
    num_held: int = 0
    num_generated: int = 0
    forked_at: int = 0


class ListThreads(RequestThreads):
    """Reads lists from the threads of one request.

    A token enters the tree when it is certain to be text if its item is: what a detail writes after
    its last line may be the next item, and a head is one when it has ended. The root's tokens after
    an item are text if they begin no other item. An item's paragraph is held back until the root
    has begun it.
    """

    def __init__(
        self,
        request_id: str,
        parameters: ForkParameters,
        rules: ListRules,
        prompt: Sequence[int],
        *args: Any,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(request_id, parameters, None, *args, **kwargs)
        self._rules = rules
        self._control_ids = rules.marker_ids
        self._num_left = max_tokens
        self._root = rules.root_reader(prompt)
        self._readers: dict[ThreadId, ListReader] = {ROOT_THREAD: self._root}
        # Tokens that a thread has generated, and that may not be text.
        self._uncertain: defaultdict[ThreadId, list[TextToken]] = defaultdict(list)
        # By the item's number: threads of heads, and of details.
        self._heads: dict[int, ThreadId] = {}
        self._details: dict[int, ThreadId] = {}
        self._head_nodes: dict[int, ParagraphNode[TextToken]] = {}
        self._begun: set[int] = set()
        # Threads that the engine has not opened.
        self._refused: set[ThreadId] = set()
        self._waits = False
        self._num_discarded = self._num_joins = self._num_recomputed = 0
        self._progress = {ROOT_THREAD: _Progress(0, 0)}
        self._attended_tokens = self._attending_tokens = 0
        self._changes: defaultdict[int, CachedChange] = defaultdict(CachedChange)

    def feed(self, output: EngineCoreOutput) -> Sequence[str]:
        """Add one thread's output; return the engine request ids of its new children."""
        if self._is_discarded(output):
            return ()
        return super().feed(output)

    def take(self) -> list[EngineCoreOutput]:
        """Return what became certain; the text ends at `max_tokens`, as that of one thread."""
        taken: list[EngineCoreOutput] = []
        for output in super().take():
            number = len(output.new_token_ids)
            if self._num_left is not None and 0 < self._num_left <= number:
                return [*taken, _shortened(output, self._num_left)]
            if self._num_left is not None:
                self._num_left -= number
            taken.append(output)
        return taken

    def statistics(self, num_prompt_tokens: int) -> TreeStatistics:
        """Return what writing the items in parallel saved and cost.

        A probe of the root is a part of its thread: each takes the steps of its tokens.
        """
        threads = self.tree.threads.items()
        records = [record for name, record in threads if name not in self._refused]
        num_forced = sum(record.num_header + record.num_forced for record in records)
        text_tokens = num_forced + sum(record.num_generated_items for record in records)
        root = self.tree.threads[ROOT_THREAD]
        steps = text_tokens + root.ended
        return TreeStatistics(
            threads=len(records),
            forks=len(records) - 1,
            max_depth=max(record.depth for record in records),
            decode_steps=self._progress[ROOT_THREAD].step,
            sequential_steps=steps,
            attended_tokens=self._attended_tokens + self._attending_tokens * num_prompt_tokens,
            sequential_attended_tokens=attended_by(num_prompt_tokens, steps),
            max_cached_tokens=num_prompt_tokens + largest_cached(self._changes),
            sequential_max_cached_tokens=num_prompt_tokens + max(steps - 1, 0),
            text_tokens=text_tokens,
            control_tokens=sum(record.num_seed + record.ended for record in records),
            joins=self._num_joins,
            forced_tokens=num_forced,
            recomputed_tokens=self._num_recomputed,
            discarded_tokens=self._num_discarded + self.tree.discarded_tokens,
        )

    def forked_at(self, child: ThreadId) -> int:
        """Return how many tokens its parent had generated when it opened a child's item."""
        return self._progress[child].forked_at

    def _feed_tokens(self, thread: ThreadId, output: EngineCoreOutput, *, ended: bool) -> list[str]:
        """Add the tokens of one output; return the engine request ids of its new children."""
        reader = self._readers[thread]
        num_text = len(output.new_token_ids) - ended
        children: list[str] = []
        for index, token in enumerate(self._text_tokens(output, 0, num_text), 1):
            if thread == ROOT_THREAD:
                self._continue_root()
            self._count(thread)
            self._uncertain[thread].append(token)
            is_last = output.finish_reason is not None and index == len(output.new_token_ids)
            # Only items end with a token that shows something, and then without a reason.
            shown = output.finish_reason == FinishReason.STOP and output.stop_reason is None
            stopped = is_last and not (thread != ROOT_THREAD and shown)
            mark = reader.read(token.token_id, stopped=stopped)
            self._take_certain(thread, reader, mark)
            if isinstance(mark, ListBlock):
                children += self._open(output.request_id, thread, mark)
            elif isinstance(mark, ListEnd):
                self._discard_after(mark.number)
            if thread == ROOT_THREAD and isinstance(mark, ListBlock | NextItem):
                self._set_waiting(True)
        if ended:
            if thread == ROOT_THREAD:
                self._continue_root()
            self._count(thread)
        return children

    def _take_certain(self, thread: ThreadId, reader: ListReader, mark: Any) -> None:
        """Move the tokens that are text, if their item is, to the tree."""
        uncertain = self._uncertain[thread]
        if isinstance(reader, RootThread):
            if isinstance(mark, NextItem):
                self._begin_item(mark.run.number)
                return
            number = 0 if reader.is_probing and not isinstance(mark, ListBlock) else len(uncertain)
        else:
            number = reader.num_certain - self.tree.threads[thread].num_generated_items
        if number > 0:
            self.tree.append(thread, uncertain[:number])
            del uncertain[:number]

    def _open(self, request_id: str, thread: ThreadId, block: ListBlock) -> list[str]:
        """Open an item; return the engine request ids of its threads."""
        if thread == ROOT_THREAD:
            self._heads, self._details, self._head_nodes, self._begun = {}, {}, {}, set()
        opened: list[str] = []
        start = self._progress[thread]
        for child, num_skipped, reader in zip(
            block.children,
            (block.num_skipped, 0),
            self._rules.child_readers(block),
            strict=True,
        ):
            ordinal = len(self.tree.threads[thread].children)
            child_id, name = child_request_id(request_id, ordinal), child_thread(thread, ordinal)
            self.tree.fork(thread, name)
            self.tree.threads[thread].has_fork_tokens = False
            self.tree.threads[name].num_seed = len(child.seed)
            self._threads[child_id], self._readers[name] = name, reader
            num_before = start.num_before - num_skipped + len(child.seed)
            self._progress[name] = _Progress(
                start.step, num_before, len(child.seed), forked_at=start.num_generated
            )
            self._changes[start.step + 1].tokens += len(child.seed)
            if isinstance(reader, HeadThread):
                self._heads[reader.number] = name
                node = self._head_nodes[reader.number] = self.tree.threads[name].current_node
                node.held = True
            else:
                self._details[block.number] = name
            if self.follower is not None:
                self.follower.forked(request_id, child_id)
            opened.append(child_id)
        self._show_item(block.number)
        return opened

    def _begin_item(self, number: int) -> None:
        """Note that the root has begun an item, so that it is a part of the text."""
        self._begun.add(number)
        self._show_item(number)

    def _show_item(self, number: int) -> None:
        """Put an item into the text when it has a head and the root has begun it."""
        name, run = self._heads.get(number), self._root.run
        if name is None or run is None or number not in self._begun:
            return
        reader = self._readers[name]
        if not isinstance(reader, HeadThread) or not reader.has_ended:
            return
        marker = self._rules.encode(run.shape.marker.text(number))
        lead = [*self._rules.separator_ids(run, number), *marker]
        node, record = self._head_nodes[number], self.tree.threads[name]
        node.lead, node.held = [plain_token(token_id) for token_id in lead], False
        record.num_header = len(lead)

    def _continue_root(self) -> None:
        """Let the root continue after the item that it has waited for."""
        if not self._waits:
            return
        self._set_waiting(False)
        run, progress = self._root.run, self._progress[ROOT_THREAD]
        if run is None:
            return
        if run.is_declined:
            self._discard_after(run.number)
            self._discard(self._details[run.number])
            return
        probed = self._uncertain[ROOT_THREAD]
        name = self._details.get(run.number)
        if run.item(run.number).failed or name is None:
            head = self._progress[self._heads[run.number]]
            progress.step = max(progress.step, head.step)
            self._discard_after(run.number - 1)
            self.tree.append(ROOT_THREAD, probed)
            probed.clear()
            return
        self._num_discarded += len(probed)
        num_item = len(self._rules.item_tokens(run, run.number))
        self._num_joins += 1
        self._num_recomputed += 0 if run.number == run.first_number else num_item
        progress.step = max(progress.step, self._progress[name].step)
        progress.num_before += num_item - len(probed)
        self._changes[progress.step + 1].tokens += num_item - len(probed)
        probed.clear()

    def _set_waiting(self, waits: bool) -> None:
        self._waits = self.tree.threads[ROOT_THREAD].pauses = waits

    def _count(self, thread: ThreadId) -> None:
        """Count a token that a thread generates."""
        progress = self._progress[thread]
        self._attended_tokens += progress.num_before
        self._attending_tokens += 1
        progress.step += 1
        progress.num_before += 1
        progress.num_held += 1
        progress.num_generated += 1
        # A token is cached from the step after its generation.
        self._changes[progress.step + 1].tokens += 1

    def _free(self, thread: ThreadId) -> None:
        """Count the tokens that are freed where a thread has ended."""
        progress = self._progress[thread]
        if thread != ROOT_THREAD:
            self._changes[progress.step + 1].tokens -= progress.num_held

    def _finish(self, thread: ThreadId, output: EngineCoreOutput, *, ended: bool) -> None:
        reader = self._readers[thread]
        uncertain = self._uncertain.pop(thread, [])
        num_taken = self.tree.threads[thread].num_generated_items
        num_own = num_taken + len(uncertain)
        num_kept = reader.num_text(num_own) - num_taken
        if thread == ROOT_THREAD and self._waits:
            num_kept = 0
        if num_kept < len(uncertain) or num_own == 0:
            output.stop_reason = None  # The client's stop token is no text.
        self.tree.append(thread, uncertain[:num_kept])
        self.tree.force(thread, [plain_token(token_id) for token_id in reader.forced_ids])
        # How many tokens an item has is all that is asked of its text here.
        refused = output.finish_reason == FinishReason.LENGTH and num_own == 0
        reader.ends([0] * num_own, refused=refused)
        if refused and thread != ROOT_THREAD:
            self._refused.add(thread)
        self._num_discarded += len(uncertain) - num_kept
        self._free(thread)
        reasons, stop_reason = set(self._reasons), self._stop_reason
        super()._finish(thread, output, ended=ended)
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return
        if thread != ROOT_THREAD:
            # Where an item ends is not where the answer ends.
            self._reasons, self._stop_reason = reasons, stop_reason
        elif (run := self._root.run) is not None:
            is_second = run.number == run.first_number
            has_head = not self._waits or is_second or bool(run.item(run.number).header)
            self._discard_after(run.number if has_head else run.number - 1)

    def _discard_after(self, number: int) -> None:
        """Remove the items after one from the text."""
        first = self._heads.get(number + 1)
        self._heads = {}
        if first is not None:
            self._discard(first)

    def _discard(self, first: ThreadId) -> None:
        """Remove a thread, and all threads below it, from the text."""
        for name, was_live in self.tree.discard(first).items():
            if was_live:
                self._free(name)
            self._num_discarded += len(self._uncertain.pop(name, ()))
            if self.tags is not None:
                self.tags.discard(name)


def _shortened(output: EngineCoreOutput, number: int) -> EngineCoreOutput:
    """Return an output that ends the answer by length after so many of its tokens."""
    if output.finish_reason is not None and number == len(output.new_token_ids):
        return output  # A stop token of the client is the last token.
    output.new_token_ids = output.new_token_ids[:number]
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(0, number)
    if output.new_sampling_mask is not None:
        output.new_sampling_mask = output.new_sampling_mask.slice_request(0, number)
    output.finish_reason, output.stop_reason = FinishReason.LENGTH, None
    return output
