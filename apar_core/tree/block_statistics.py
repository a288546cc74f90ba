"""Statistics of trees whose threads wait for their children.

Schedule: every live thread gains one token per step. A child's first token comes in the step after
its parent's trigger, and a parent's next one in the step after the last of its children has ended.
Seeds and joined texts are computed in these steps and cost none.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Generic, NamedTuple, TypeVar

from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.statistics import (
    CachedChange,
    TreeStatistics,
    attended_by,
    largest_cached,
    thread_spans,
)
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId

Item = TypeVar("Item")


def block_statistics(
    tree: ParagraphTree[Item], num_prompt_tokens: int, *, reads_children: bool = True
) -> TreeStatistics:
    """Return the statistics of a tree, in time that grows with its threads, not its tokens.

    Terms are those of `TreeStatistics`. The single thread generates the whole text, the format's
    own part of it included. An unfinished thread counts as cut off where it is now. The tokens of a
    block's first child stay cached until the join, because its parent continues after them.
    `reads_children`: whether a parent that joins reads its children's texts, not only results.
    """
    records = tree.threads.values()
    schedule = _Schedule(tree, reads_children=reads_children)
    end_step = schedule.run(ROOT_THREAD, 0, num_prompt_tokens, 0).end_step
    num_forced = sum(record.num_header + record.num_forced for record in records)
    text_tokens = num_forced + sum(record.num_generated_items for record in records)
    sequential_steps = text_tokens + tree.threads[ROOT_THREAD].ended
    return TreeStatistics(
        threads=len(records),
        forks=len(records) - 1,
        max_depth=max(record.depth for record in records),
        decode_steps=end_step,
        sequential_steps=sequential_steps,
        attended_tokens=schedule.attended_tokens,
        sequential_attended_tokens=attended_by(num_prompt_tokens, sequential_steps),
        max_cached_tokens=num_prompt_tokens + largest_cached(schedule.changes),
        sequential_max_cached_tokens=num_prompt_tokens + max(sequential_steps - 1, 0),
        text_tokens=text_tokens,
        control_tokens=sum(record.num_seed + record.ended for record in records),
        joins=sum(len(record.suffixes) for record in records),
        forced_tokens=num_forced,
        recomputed_tokens=schedule.recomputed_tokens,
        discarded_tokens=tree.discarded_tokens,
    )


def thread_steps(tree: ParagraphTree[Item]) -> dict[ThreadId, list[tuple[int, int]]]:
    """Return first and last step of each stretch in which a thread generates.

    Steps count from 1. A thread that waits for children has a stretch before and after each block;
    one that generated nothing has none.
    """
    if not any(record.blocks or record.joins_later for record in tree.threads.values()):
        spans = thread_spans(tree).items()
        return {
            name: [(span.start + 1, span.end)] if span.num_generated else [] for name, span in spans
        }
    schedule = _Schedule(tree)
    schedule.run(ROOT_THREAD, 0, 0, 0)
    return {name: schedule.stretches[name] for name in tree.threads}


class _Ended(NamedTuple):
    """A thread that has run: its last step, and the tokens of its text and those that it held."""

    end_step: int
    text_tokens: int
    held_tokens: int


class _Schedule(Generic[Item]):
    def __init__(self, tree: ParagraphTree[Item], *, reads_children: bool = True) -> None:
        self._tree = tree
        self._reads_children = reads_children
        self.attended_tokens = 0
        self.recomputed_tokens = 0
        self.changes: defaultdict[int, CachedChange] = defaultdict(CachedChange)
        self.stretches: defaultdict[ThreadId, list[tuple[int, int]]] = defaultdict(list)

    def run(self, thread: ThreadId, step: int, num_before: int, num_seed: int) -> _Ended:
        """Run a thread with its descendants from a step on, after so many tokens."""
        record = self._tree.threads[thread]
        if record.joins_later:
            return self._run_joining(thread, step, num_before)
        self.changes[step + 1].tokens += num_seed
        held, text, generated = num_seed, 0, 0
        for number, block in enumerate(record.blocks):
            num_new = block.num_generated - generated
            generated = block.num_generated
            step = self._generate(thread, step, num_before + text, num_new)
            text += num_new
            held += num_new
            # Its last token is computed for its children.
            self.changes[step + 1].tokens += 1
            end_step, joined, first_held = step, 0, 0
            for ordinal in range(block.first_child, block.first_child + block.num_children):
                name = record.children[ordinal]
                child = self._tree.threads[name]
                ended = self.run(name, step, num_before + text + child.num_seed, child.num_seed)
                end_step = max(end_step, ended.end_step)
                joined += child.num_header + ended.text_tokens + child.num_closing
                if ordinal == block.first_child:
                    first_held = ended.held_tokens
                else:
                    self.changes[ended.end_step + 1].tokens -= ended.held_tokens
                    self.recomputed_tokens += ended.text_tokens
            step = end_step
            self.changes[step + 1].tokens -= first_held
            if number < len(record.suffixes):
                joined += record.suffixes[number]
                self.changes[step + 1].tokens += joined
                held += joined
                text += joined
        num_new = record.num_generated_items - generated + record.ended
        step = self._generate(thread, step, num_before + text, num_new)
        return _Ended(step, text + num_new - record.ended, held + max(num_new - 1, 0))

    def _run_joining(self, thread: ThreadId, step: int, num_before: int) -> _Ended:
        """Run a thread that continues beside its children, and joins some of them."""
        record = self._tree.threads[thread]
        children = [self._tree.threads[name] for name in record.children]
        forks = [(child.fork_index, 0, ordinal) for ordinal, child in enumerate(children)]
        joins = [(block.num_generated, 1, number) for number, block in enumerate(record.blocks)]
        ended: dict[int, _Ended] = {}
        held = text = generated = 0
        for at, joins_now, index in sorted(forks + joins):
            step = self._generate(thread, step, num_before + text, at - generated)
            text, held = text + at - generated, held + at - generated
            generated = at
            if not joins_now:
                num_seed = children[index].num_seed
                before = num_before + text + num_seed
                child = self.run(record.children[index], step, before, num_seed)
                self.changes[child.end_step + 1].tokens -= child.held_tokens
                ended[index] = child
                continue
            ordinal = record.blocks[index].first_child
            step = max(step, ended[ordinal].end_step)
            joined = 0
            if self._reads_children:
                joined = children[ordinal].num_header + ended[ordinal].text_tokens
                joined += children[ordinal].num_closing
                self.recomputed_tokens += ended[ordinal].text_tokens
            if index < len(record.suffixes):
                joined += record.suffixes[index]
                self.changes[step + 1].tokens += joined
                held, text = held + joined, text + joined
        num_new = record.num_generated_items - generated + record.ended
        step = self._generate(thread, step, num_before + text, num_new)
        return _Ended(step, text + num_new - record.ended, held + max(num_new - 1, 0))

    def _generate(self, thread: ThreadId, step: int, num_before: int, num_new: int) -> int:
        """Generate tokens after others; return the step of the last one."""
        if num_new == 0:
            return step
        self.stretches[thread].append((step + 1, step + num_new))
        self.attended_tokens += attended_by(num_before, num_new)
        self.changes[step + 1].growth += 1
        self.changes[step + num_new].growth -= 1
        return step + num_new
