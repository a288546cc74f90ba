"""What every decoder offers: a prompt in, a stream of forward passes out, an answer at its end."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from apar_core.errors import RequestError
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


class DecodeLimits(BaseModel):
    """Limits on one answer, with the meaning that they have in the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: PositiveInt = Field(
        1024, description="Text tokens of all threads together; then all are cut off."
    )
    max_threads: PositiveInt = Field(
        32, description="Threads alive at once; a fork beyond it waits for a place."
    )
    max_forks: PositiveInt = Field(
        512, description="Forks in all; beyond it a fork opens no thread."
    )


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """How the next token of a thread is chosen: use `greedy`, `sampled` or `replay`.

    `tokens_of_thread` maps a thread's path ("" for the root thread, "0.2" for the third child of
    its first child) to all that it generates, fork and end tokens included. A thread whose tokens
    do not end with the end token is cut off after them.

    Raises RequestError for a temperature below 0 and for a `top_p` outside ]0, 1].
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    tokens_of_thread: Mapping[str, Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise RequestError(
                f"temperature must be at least 0 and finite, got {self.temperature}",
                param="temperature",
            )
        if not 0 < self.top_p <= 1:
            raise RequestError(
                f"top_p must be above 0 and at most 1, got {self.top_p}", param="top_p"
            )

    @classmethod
    def greedy(cls) -> TokenChoice:
        """Take the likeliest token each time."""
        return cls()

    @classmethod
    def sampled(
        cls, temperature: float, top_p: float = 1.0, seed: int | None = None
    ) -> TokenChoice:
        """Draw from the likeliest tokens that together have the share `top_p`.

        Every thread draws from a stream of its own, so that an answer with a seed does not
        depend on which threads ran side by side. A temperature of 0 is greedy.
        """
        return cls(temperature, top_p, seed)

    @classmethod
    def replay(cls, tokens_of_thread: Mapping[str, Sequence[int]]) -> TokenChoice:
        """Force these tokens: passes, forks and caches are real, only the choice is not."""
        return cls(tokens_of_thread=tokens_of_thread)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A forward pass that is done; `new_ids` continue the text in reading order.

    A token is held back until its place is certain: a detail before the next paragraph.
    """

    record: StepRecord
    new_ids: tuple[int, ...]


DecodeStream = Generator[DecodeStep, None, DecodedAnswer]
"""Yields every pass and returns the answer; closing it early frees all that it holds."""


class AnswerDecoder(Protocol):
    """Generates one answer at a time."""

    def stream(
        self,
        prompt_ids: Sequence[int],
        choice: TokenChoice | None = None,
        limits: DecodeLimits | None = None,
    ) -> DecodeStream:
        """Decode pass by pass; greedy with the default limits unless told otherwise.

        Raises RequestError, from the first pass on, for a prompt, a choice or limits that this
        decoder cannot take.
        """
        ...


def decode_answer(
    decoder: AnswerDecoder,
    prompt_ids: Sequence[int],
    choice: TokenChoice | None = None,
    limits: DecodeLimits | None = None,
) -> DecodedAnswer:
    """Run a decoder to its end and return the answer."""
    stream = decoder.stream(prompt_ids, choice, limits)
    while True:
        try:
            next(stream)
        except StopIteration as stop:
            answer: DecodedAnswer = stop.value
            return answer
