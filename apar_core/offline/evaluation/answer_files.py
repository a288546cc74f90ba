"""Files of recorded answers, for replay and judging.

Supported are FastChat answers (`choices` with `turns`), answers of the older Vicuna evaluation
(`text`), and traces (`prompt`, `response`, `history`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from pydantic import BaseModel, model_validator

from apar_core.errors import EvaluationError
from apar_core.json_lines import read_lines
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.prompt_sets import (
    BENCHMARKS,
    OTHER_CATEGORY,
    Choice,
    Question,
    load_benchmark,
)

MIN_CATEGORY_ANSWERS = 10
"""Trace categories with fewer answers are counted as "other"."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """Answer and the chat that it answers; `turn` counts from 1."""

    question_id: str
    category: str
    turn: int
    messages: tuple[ChatMessage, ...]
    text: str


@dataclass(frozen=True, slots=True)
class AnswerSet:
    """Answers of one file; `benchmark` is None if they do not belong to one."""

    label: str
    benchmark: str | None
    answers: tuple[RecordedAnswer, ...]


class _Message(BaseModel):
    role: str
    content: str


class AnswerLine(BaseModel):
    """Line of an answer file in any of the three formats."""

    question_id: int | str | None = None
    id: int | str | None = None
    model_id: str | None = None
    category: str = OTHER_CATEGORY
    choices: list[Choice] | None = None
    text: str | None = None
    prompt: str | None = None
    response: str | None = None
    history: list[_Message] = []
    turn: int = 1

    @model_validator(mode="after")
    def _check(self) -> AnswerLine:
        if self.response is not None:
            if self.prompt is None:
                raise ValueError("a 'response' needs its 'prompt'")
        elif self.question_id is None:
            raise ValueError("needs a 'question_id', or a 'prompt' with its 'response'")
        elif not self.turn_texts:
            raise ValueError("needs 'choices' with 'turns', a 'text', or a 'response'")
        return self

    @property
    def turn_texts(self) -> tuple[str, ...]:
        """Answers of all turns, in the formats that refer to a benchmark question."""
        if self.choices:
            return tuple(self.choices[0].turns)
        return () if self.text is None else (self.text,)


def read_answer_set(path: Path, questions_folder: Path | None = None) -> AnswerSet:
    """Return the answers of a file; benchmark answers get their question's chat and category.

    Empty answers are skipped. Raises EvaluationError for invalid lines and unknown questions.
    """
    lines = list(read_lines(path, AnswerLine))
    if not lines:
        raise EvaluationError(f"{path} has no answer")
    label = path.stem.removeprefix("answer_")
    if lines[0].response is not None:
        answers = [_traced(line, str(number)) for number, line in enumerate(lines)]
        return AnswerSet(label, None, tuple(_without_small_categories(answers)))
    benchmark, questions = _benchmark_of(lines, path, questions_folder)
    found = (_benchmark_answers(line, questions[str(line.question_id)], path) for line in lines)
    return AnswerSet(label, benchmark, tuple(chain.from_iterable(found)))


def _traced(line: AnswerLine, fallback_id: str) -> RecordedAnswer:
    history = [ChatMessage(message.role, message.content) for message in line.history]
    return RecordedAnswer(
        question_id=fallback_id if line.id is None else str(line.id),
        category=line.category,
        turn=line.turn,
        messages=(*history, ChatMessage("user", line.prompt or "")),
        text=line.response or "",
    )


def _without_small_categories(answers: list[RecordedAnswer]) -> list[RecordedAnswer]:
    sizes = Counter(answer.category for answer in answers)
    return [
        replace(answer, category=OTHER_CATEGORY)
        if sizes[answer.category] < MIN_CATEGORY_ANSWERS
        else answer
        for answer in answers
        if answer.text
    ]


def _benchmark_of(
    lines: list[AnswerLine], path: Path, questions_folder: Path | None
) -> tuple[str, dict[str, Question]]:
    """Return the benchmark that contains all questions of the file, and its questions by id."""
    wanted = {str(line.question_id) for line in lines}
    unknown: set[str] = wanted
    for benchmark in BENCHMARKS:
        questions = {each.question_id: each for each in load_benchmark(benchmark, questions_folder)}
        missing = wanted - questions.keys()
        if not missing:
            return benchmark, questions
        unknown = min(unknown, missing, key=len)
    raise EvaluationError(
        f"{path}: no benchmark has all its questions; unknown: {', '.join(sorted(unknown)[:5])}"
    )


def _benchmark_answers(line: AnswerLine, question: Question, path: Path) -> list[RecordedAnswer]:
    texts = line.turn_texts
    if len(texts) > len(question.turns):
        raise EvaluationError(
            f"{path}: question {question.question_id} has {len(question.turns)} turns, its answer "
            f"{len(texts)}"
        )
    ids = (question.question_id, question.category)
    return [
        RecordedAnswer(*ids, turn + 1, question.messages(turn, texts[:turn]), text)
        for turn, text in enumerate(texts)
        if text
    ]
