"""What a decoder returns: the threads of an answer, and a record of every forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.restore import restore
from apar_core.tree.thread_names import ThreadId


@dataclass(frozen=True, slots=True)
class DecodedThread:
    """What one thread sampled, fork tokens included, the end of thread left out.

    `parent` opened it with its fork number `fork_ordinal` (from 0). `ended` is false where a
    limit cut the thread off.
    """

    thread: ThreadId
    parent: ThreadId | None
    fork_ordinal: int
    token_ids: tuple[int, ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward pass, the prefill being the first; `step` counts from 1.

    threads: threads alive in the pass, whether it gave them a token or not.
    tokens: tokens that all threads gained (text, fork and end tokens).
    seconds: wall time, from the pass's inputs to the tokens' arrival here.
    cached_tokens: KV tokens that the threads' paths hold in the pass, shared ones counted once;
        candidates that Medusa heads propose are not counted.
    attended_tokens: tokens before each token gained on its path, summed over those tokens.
    The last two are counted as by `apar_core.tree.statistics`.
    """

    step: int
    threads: int
    tokens: int
    seconds: float
    cached_tokens: int
    attended_tokens: int


@dataclass(frozen=True)
class DecodedAnswer:
    """A whole answer: threads with parents before their children, and the trace of its passes.

    `fork_id` is the checkpoint's fork token, None for an ordinary model.
    """

    threads: tuple[DecodedThread, ...]
    trace: tuple[StepRecord, ...]
    num_prompt_tokens: int
    fork_id: int | None

    @cached_property
    def tree(self) -> ParagraphTree[int]:
        """The finished paragraph tree of token ids."""
        return paragraph_tree(self.threads, self.fork_id)

    @property
    def text_ids(self) -> list[int]:
        """The answer's tokens in reading order, without control and end tokens."""
        return restore(self.tree)


def paragraph_tree(threads: Sequence[DecodedThread], fork_id: int | None) -> ParagraphTree[int]:
    """Return the paragraph tree that the threads, parents first, have written."""
    tree: ParagraphTree[int] = ParagraphTree()
    children = {
        (thread.parent, thread.fork_ordinal): thread.thread
        for thread in threads
        if thread.parent is not None
    }
    for thread in threads:
        ordinal = 0
        for token_id in thread.token_ids:
            if token_id == fork_id:
                tree.fork(thread.thread, children[(thread.thread, ordinal)])
                ordinal += 1
            else:
                tree.append(thread.thread, [token_id])
        tree.finish(thread.thread, ended=thread.ended)
    return tree


def restored_ids(threads: Sequence[DecodedThread], fork_id: int) -> list[int]:
    """Return the answer's tokens in reading order."""
    return restore(paragraph_tree(threads, fork_id))
