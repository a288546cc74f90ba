"""Interface of the decoders: limits, token choice, steps, and the answer with its trace."""

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
    """Sampled tokens of one thread, including fork tokens but not the end token.

    `parent` opened it with its fork number `fork_ordinal` (from 0). `ended` is false if a limit cut
    the thread off.
    """

    thread: ThreadId
    parent: ThreadId | None
    fork_ordinal: int
    token_ids: tuple[int, ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Record of a forward pass; `step` counts from 1, the prefill.

    threads: threads alive in the pass, whether they gained a token or not.
    tokens: tokens that all threads gained (text, fork and end tokens).
    seconds: wall time, from preparing the inputs to receiving the tokens.
    cached_tokens: KV tokens on the threads' paths, shared ones counted once; without candidates
        and prompt tokens.
    attended_tokens: for each token gained, the tokens before it on its path, summed.
    The last two are defined as in `apar_core.tree.statistics`.
    """

    step: int
    threads: int
    tokens: int
    seconds: float
    cached_tokens: int
    attended_tokens: int


@dataclass(frozen=True)
class DecodedAnswer:
    """Answer as threads, parents before their children, and the trace of its passes.

    `fork_id` is the checkpoint's fork token; None for a model without control tokens.
    """

    threads: tuple[DecodedThread, ...]
    trace: tuple[StepRecord, ...]
    num_prompt_tokens: int
    fork_id: int | None

    @cached_property
    def tree(self) -> ParagraphTree[int]:
        """Finished paragraph tree of token ids."""
        return paragraph_tree(self.threads, self.fork_id)

    @property
    def text_ids(self) -> list[int]:
        """Tokens in reading order, without control and end tokens."""
        return restore(self.tree)


def paragraph_tree(threads: Sequence[DecodedThread], fork_id: int | None) -> ParagraphTree[int]:
    """Return the paragraph tree of threads, parents before their children."""
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


class DecodeLimits(BaseModel):
    """Limits on one answer, with the same meaning as in the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: PositiveInt = Field(
        1024, description="Text tokens of all threads; the answer is cut off after them."
    )
    max_threads: PositiveInt = Field(32, description="Threads alive at once; further threads wait.")
    max_forks: PositiveInt = Field(512, description="Forks in total; further forks open no thread.")


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Choice of tokens; create it with `greedy`, `sampled` or `replay`.

    `tokens_of_thread` maps replay keys to all tokens of the thread, including fork and end tokens.
    The key "" is the root thread, "0.2" the third child of its first child. A thread whose tokens
    lack the end token is cut off after them.

    Raises RequestError for a temperature below 0 and for a `top_p` outside (0, 1].
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
        """Always take the likeliest token."""
        return cls()

    @classmethod
    def sampled(
        cls, temperature: float, top_p: float = 1.0, seed: int | None = None
    ) -> TokenChoice:
        """Sample from the nucleus of probability `top_p`; a temperature of 0 is greedy.

        Each thread has its own random stream. Without speculation, a seeded answer does not depend
        on which threads ran concurrently. With it, typical acceptance sees the candidates of a
        tree, and the tree may depend on the number of live threads.
        """
        return cls(temperature, top_p, seed)

    @classmethod
    def replay(cls, tokens_of_thread: Mapping[str, Sequence[int]]) -> TokenChoice:
        """Force these tokens; passes, forks and caches are as in generation."""
        return cls(tokens_of_thread=tokens_of_thread)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Result of a forward pass; `new_ids` continue the text in reading order.

    A token is held back until all text before it is complete.
    """

    record: StepRecord
    new_ids: tuple[int, ...]


DecodeStream = Generator[DecodeStep, None, DecodedAnswer]
"""Yields each step and returns the answer; closing it early frees the cache."""


class AnswerDecoder(Protocol):
    """Decoder of one answer at a time."""

    def stream(
        self,
        prompt_ids: Sequence[int],
        choice: TokenChoice | None = None,
        limits: DecodeLimits | None = None,
    ) -> DecodeStream:
        """Decode step by step; the defaults are greedy choice and default limits.

        The first step raises RequestError for a prompt or choice that this decoder does not accept.
        """
        ...


def decode_answer(
    decoder: AnswerDecoder,
    prompt_ids: Sequence[int],
    choice: TokenChoice | None = None,
    limits: DecodeLimits | None = None,
) -> DecodedAnswer:
    """Run a decoder to the end and return the answer."""
    stream = decoder.stream(prompt_ids, choice, limits)
    while True:
        try:
            next(stream)
        except StopIteration as stop:
            answer: DecodedAnswer = stop.value
            return answer
