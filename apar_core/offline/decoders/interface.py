"""What every decoder offers: a prompt in, a stream of forward passes out, an answer at its end."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from apar_core.errors import RequestError
from apar_core.offline.decoders.decoded_answer import DecodedAnswer, StepRecord


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
