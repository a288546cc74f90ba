"""What one request costs an engine on average, by its prompt's length and its answer's tree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from apar_core.tree import ParagraphTree, ThreadId, ThreadSpan, thread_spans
from apar_core.tree.statistics import cached_tokens_by_step, tree_statistics
from cluster.sizing.errors import SizingError

LONG = 0.99
"""Share of the requests that are no longer than the long one."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Means over requests, in the paper's schedule (a child starts in the step after its fork).

    steps: decode steps until the last thread ends; `long_steps` is their 99 % quantile.
    attended_tokens: KV cache entries read for one request, summed over its predicted tokens.
    held_tokens, alive_threads: KV cache entries held, and threads alive, at a random moment of a
        request's decoding, with their standard deviations `..._sd` over requests and moments.
    peak_tokens: most entries held at once. `sequential_...` is the same text without forks.
    """

    source: str
    prompt_tokens: float
    text_tokens: float
    generated_tokens: float
    threads: float
    steps: float
    long_steps: float
    attended_tokens: float
    held_tokens: float
    held_tokens_sd: float
    alive_threads: float
    alive_threads_sd: float
    peak_tokens: float
    sequential_steps: float
    sequential_attended_tokens: float
    sequential_peak_tokens: float


Answer = tuple[int, ParagraphTree[int]]
"""Tokens of a prompt, and the tree that answers it."""


def shape_of(answers: Iterable[Answer], source: str) -> RequestShape:
    """The mean request of recorded ones. Raises SizingError without any."""
    taken = list(answers)
    if not taken:
        raise SizingError(f"{source} holds no answer")
    statistics = [tree_statistics(tree, prompt) for prompt, tree in taken]
    held = _Moments()
    alive = _Moments()
    for prompt, tree in taken:
        spans = thread_spans(tree)
        threads = _threads_by_step(spans)
        num_steps = len(threads)
        held.add([prompt + own for own in cached_tokens_by_step(tree, spans)[1 : num_steps + 1]])
        alive.add(threads)
    number = len(taken)

    def mean(name: str) -> float:
        return float(sum(getattr(each, name) for each in statistics)) / number

    threads_mean = mean("threads")
    steps = sorted(each.decode_steps for each in statistics)
    return RequestShape(
        source=source,
        prompt_tokens=sum(prompt for prompt, _ in taken) / number,
        text_tokens=mean("text_tokens"),
        # Text, a fork token for every child, an end token for every thread.
        generated_tokens=mean("text_tokens") + 2 * threads_mean - 1,
        threads=threads_mean,
        steps=mean("decode_steps"),
        long_steps=float(steps[math.ceil(LONG * number) - 1]),
        attended_tokens=mean("attended_tokens"),
        held_tokens=held.mean,
        held_tokens_sd=held.deviation,
        alive_threads=alive.mean,
        alive_threads_sd=alive.deviation,
        peak_tokens=mean("max_cached_tokens"),
        sequential_steps=mean("sequential_steps"),
        sequential_attended_tokens=mean("sequential_attended_tokens"),
        sequential_peak_tokens=mean("sequential_max_cached_tokens"),
    )


class _Moments:
    """Mean and standard deviation of values that come in sequences."""

    def __init__(self) -> None:
        self._number = 0
        self._sum = self._squares = 0.0

    def add(self, values: Sequence[int]) -> None:
        self._number += len(values)
        self._sum += sum(values)
        self._squares += sum(value * value for value in values)

    @property
    def mean(self) -> float:
        return self._sum / self._number

    @property
    def deviation(self) -> float:
        return math.sqrt(max(self._squares / self._number - self.mean**2, 0.0))


def _threads_by_step(spans: Mapping[ThreadId, ThreadSpan]) -> list[int]:
    """Live threads in each step, from the first on."""
    last = max(span.end for span in spans.values())
    changes = [0] * (last + 1)
    for span in spans.values():
        changes[span.start] += 1
        changes[span.end] -= 1
    return list(accumulate(changes))[:last]
