"""Measurements of answers: counted or timed, and averaged by category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from apar_core.offline.decoders.interface import DecodedAnswer
from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.statistics import tree_statistics

COUNT = "count"
"""Decoder name of answers counted by the schedule, without a model."""


class AnswerMeasurement(BaseModel):
    """Measurement of one answer; `sequential_...` refers to the same text in a single thread.

    `decoder` is the decoder's name, or "count" without a model. `steps`, `max_cached_tokens` and
    `attended_tokens` are measured by the decoder. `decode_s` is the time of all passes except the
    prefill, and `timed_tokens` the text tokens of those passes; both are None without a model.
    Cached and attended tokens include the prompt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    question_id: str
    turn: int
    category: str
    decoder: str
    num_prompt_tokens: int
    threads: int
    forks: int
    max_depth: int
    text_tokens: int
    control_tokens: int
    steps: int
    sequential_steps: int
    max_cached_tokens: int
    sequential_max_cached_tokens: int
    attended_tokens: int
    sequential_attended_tokens: int
    prefill_s: float | None = None
    decode_s: float | None = None
    timed_tokens: int | None = None
    ended: bool = True
    text: str = ""

    @property
    def key(self) -> tuple[str, int, str]:
        """Unique key within a run."""
        return self.question_id, self.turn, self.decoder

    @property
    def predicted_tokens(self) -> int:
        """Text, fork and end tokens; child tokens are injected, not predicted."""
        return self.text_tokens + self.control_tokens - self.forks


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """Question, turn (from 1) and category of an answer."""

    question_id: str
    turn: int
    category: str


def counted(
    key: AnswerKey, tree: ParagraphTree[int], num_prompt_tokens: int, text: str = ""
) -> AnswerMeasurement:
    """Measure an answer by the paper's schedule, without a model."""
    counts = tree_statistics(tree, num_prompt_tokens).to_plain()
    return AnswerMeasurement(
        question_id=key.question_id,
        turn=key.turn,
        category=key.category,
        decoder=COUNT,
        num_prompt_tokens=num_prompt_tokens,
        steps=counts.pop("decode_steps"),
        ended=all(thread.ended for thread in tree.threads.values()),
        text=text,
        **counts,
    )


def measured(
    key: AnswerKey, decoder: str, answer: DecodedAnswer, text: str = ""
) -> AnswerMeasurement:
    """Measure an answer by its decoder's trace.

    As in the paper, speed excludes the prefill: its time and the token that it yields.
    """
    prefill, *passes = answer.trace
    by_schedule = counted(key, answer.tree, answer.num_prompt_tokens, text)
    return by_schedule.model_copy(
        update={
            "decoder": decoder,
            "steps": len(answer.trace),
            "max_cached_tokens": max(record.cached_tokens for record in answer.trace),
            "attended_tokens": sum(record.attended_tokens for record in answer.trace),
            "prefill_s": prefill.seconds,
            "decode_s": sum(record.seconds for record in passes),
            "timed_tokens": max(by_schedule.text_tokens - 1, 0),
        }
    )


class CategoryAverages(BaseModel):
    """Averages over answers of one or several categories.

    Attended tokens are averaged over predicted tokens, everything else over answers. Only these
    averages reproduce the means in the paper's tables. Speed is total tokens / total seconds.
    """

    model_config = ConfigDict(frozen=True)

    num_answers: int
    threads: float
    forking_share: float
    text_tokens: float
    steps: float
    sequential_steps: float
    max_cached_tokens: float
    sequential_max_cached_tokens: float
    attended_tokens: float
    sequential_attended_tokens: float
    tokens_per_s: float | None

    @property
    def fewer_steps(self) -> float:
        """Ratio of the steps of a single thread to the steps taken."""
        return self.sequential_steps / self.steps


def averages(answers: Sequence[AnswerMeasurement]) -> CategoryAverages:
    """Return the averages of one or more answers."""

    def total(name: str) -> float:
        return sum(getattr(answer, name) or 0 for answer in answers)

    def mean(name: str) -> float:
        return total(name) / len(answers)

    decode_s = total("decode_s")
    return CategoryAverages(
        num_answers=len(answers),
        threads=mean("threads"),
        forking_share=sum(answer.threads > 1 for answer in answers) / len(answers),
        text_tokens=mean("text_tokens"),
        steps=mean("steps"),
        sequential_steps=mean("sequential_steps"),
        max_cached_tokens=mean("max_cached_tokens"),
        sequential_max_cached_tokens=mean("sequential_max_cached_tokens"),
        attended_tokens=total("attended_tokens") / max(total("predicted_tokens"), 1),
        sequential_attended_tokens=(
            total("sequential_attended_tokens") / max(total("sequential_steps"), 1)
        ),
        tokens_per_s=total("timed_tokens") / decode_s if decode_s else None,
    )


def by_category(answers: Sequence[AnswerMeasurement]) -> dict[str, list[AnswerMeasurement]]:
    """Group answers by category, sorted by name with "other" last, as in the paper."""
    names = {answer.category for answer in answers}
    return {
        category: [answer for answer in answers if answer.category == category]
        for category in sorted(names, key=lambda name: (name == "other", name))
    }
