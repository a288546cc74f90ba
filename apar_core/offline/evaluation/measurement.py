"""Measurements of answers: counted or timed, averaged by category, and stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from apar_core.json_lines import append_line, read_finished_lines
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
    statistics = tree_statistics(tree, num_prompt_tokens)
    return AnswerMeasurement(
        question_id=key.question_id,
        turn=key.turn,
        category=key.category,
        decoder=COUNT,
        num_prompt_tokens=num_prompt_tokens,
        threads=statistics.threads,
        forks=statistics.forks,
        max_depth=statistics.max_depth,
        text_tokens=statistics.text_tokens,
        control_tokens=statistics.control_tokens,
        steps=statistics.decode_steps,
        sequential_steps=statistics.sequential_steps,
        max_cached_tokens=statistics.max_cached_tokens,
        sequential_max_cached_tokens=statistics.sequential_max_cached_tokens,
        attended_tokens=statistics.attended_tokens,
        sequential_attended_tokens=statistics.sequential_attended_tokens,
        ended=all(thread.ended for thread in tree.threads.values()),
        text=text,
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

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(answers)

    predicted = sum(answer.predicted_tokens for answer in answers)
    sequentially_predicted = sum(answer.sequential_steps for answer in answers)
    decode_s = sum(answer.decode_s or 0.0 for answer in answers)
    return CategoryAverages(
        num_answers=len(answers),
        threads=mean(answer.threads for answer in answers),
        forking_share=mean(answer.threads > 1 for answer in answers),
        text_tokens=mean(answer.text_tokens for answer in answers),
        steps=mean(answer.steps for answer in answers),
        sequential_steps=mean(answer.sequential_steps for answer in answers),
        max_cached_tokens=mean(answer.max_cached_tokens for answer in answers),
        sequential_max_cached_tokens=mean(
            answer.sequential_max_cached_tokens for answer in answers
        ),
        attended_tokens=sum(answer.attended_tokens for answer in answers) / max(predicted, 1),
        sequential_attended_tokens=sum(answer.sequential_attended_tokens for answer in answers)
        / max(sequentially_predicted, 1),
        tokens_per_s=(
            sum(answer.timed_tokens or 0 for answer in answers) / decode_s if decode_s else None
        ),
    )


def by_category(
    answers: Sequence[AnswerMeasurement],
) -> dict[str, list[AnswerMeasurement]]:
    """Group answers by category, sorted by name with "other" last, as in the paper."""
    groups: dict[str, list[AnswerMeasurement]] = {}
    for category in sorted(
        {answer.category for answer in answers}, key=lambda name: (name == "other", name)
    ):
        groups[category] = [answer for answer in answers if answer.category == category]
    return groups


class AnswerStore:
    """Measured answers of a run, in memory and in a JSON lines file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers = {line.key: line for line in read_finished_lines(path, AnswerMeasurement)}

    def find(self, question_id: str, turn: int, decoder: str) -> AnswerMeasurement | None:
        """Return a measured answer, or None if it is not stored yet."""
        return self._answers.get((question_id, turn, decoder))

    def add(self, answer: AnswerMeasurement) -> None:
        """Store an answer."""
        append_line(self._path, answer)
        self._answers[answer.key] = answer

    def of_decoder(self, decoder: str, keys: Sequence[AnswerKey]) -> tuple[AnswerMeasurement, ...]:
        """Return a decoder's answers in the order of the keys; all must be stored."""
        return tuple(self._answers[(key.question_id, key.turn, decoder)] for key in keys)
