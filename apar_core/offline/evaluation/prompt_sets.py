"""What is asked in an evaluation: the questions of a benchmark, or those of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from apar_core.errors import EvaluationError
from apar_core.json_lines import read_lines
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.evaluation.benchmark_files import find_benchmark_file

BENCHMARKS = {"vicuna-bench": "vicuna_bench", "mt-bench": "mt_bench"}
"""The name of a benchmark and its folder."""

HELD_OUT = "held-out"
"""Name of the prompts of the embedded model's own kind that its training never saw."""

_NUM_HELD_OUT = 400

OTHER_CATEGORY = "other"
"""Of questions without a category, and of categories with too few questions for a row."""


class Question(BaseModel):
    """Turns of one user, asked one after the other; `history` is what was said before them.

    `reference` has the reference answer of each turn, where the benchmark gives any. A
    `raw_prompt` is completed as it is, without roles.
    """

    model_config = ConfigDict(frozen=True)

    question_id: str
    category: str
    turns: tuple[str, ...]
    history: tuple[ChatMessage, ...] = ()
    reference: tuple[str, ...] = ()
    raw_prompt: bool = False

    def messages(self, turn: int, answers: tuple[str, ...]) -> tuple[ChatMessage, ...]:
        """Return the chat up to the user's words of a turn (from 0), with the answers before it."""
        chat = list(self.history)
        for question, answer in zip(self.turns[:turn], answers, strict=True):
            chat += [ChatMessage("user", question), ChatMessage("assistant", answer)]
        return (*chat, ChatMessage("user", self.turns[turn]))


class _Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str

    def record(self) -> ChatMessage:
        return ChatMessage(self.role, self.content)


class QuestionLine(BaseModel):
    """A line of a prompt file: `turns`, or `prompt` (behind a `history`), or `messages`."""

    question_id: int | str | None = None
    id: int | str | None = None
    category: str = OTHER_CATEGORY
    turns: list[str] | None = None
    prompt: str | None = None
    history: list[_Message] = []
    messages: list[_Message] | None = None

    @model_validator(mode="after")
    def _check(self) -> QuestionLine:
        given = [self.turns, self.prompt, self.messages]
        if sum(field is not None for field in given) != 1:
            raise ValueError("needs exactly one of 'turns', 'prompt' and 'messages'")
        if self.messages is not None and (not self.messages or self.messages[-1].role != "user"):
            raise ValueError("'messages' has to end with the user's turn")
        if not all(turn.strip() for turn in self.question("").turns) or self.turns == []:
            raise ValueError("the question is empty")
        return self

    def question(self, fallback_id: str) -> Question:
        """Return the line in the one form; a line without an id gets `fallback_id`."""
        history = self.messages[:-1] if self.messages is not None else self.history
        turns = self.turns or [
            self.messages[-1].content if self.messages is not None else self.prompt or ""
        ]
        chosen = self.question_id if self.question_id is not None else self.id
        return Question(
            question_id=fallback_id if chosen is None else str(chosen),
            category=self.category,
            turns=tuple(turns),
            history=tuple(message.record() for message in history),
        )


class _ReferenceChoice(BaseModel):
    turns: list[str]


class _ReferenceLine(BaseModel):
    question_id: int
    choices: list[_ReferenceChoice]


def read_question_file(path: Path) -> list[Question]:
    """Return the questions of a JSON lines file in its order.

    Raises EvaluationError if a line is not as it must be, if two share an id, or if there is none.
    """
    questions = [
        line.question(str(number))
        for number, line in enumerate(read_lines(path, QuestionLine), start=1)
    ]
    seen: set[str] = set()
    for question in questions:
        if question.question_id in seen:
            raise EvaluationError(f"{path}: two questions have the id {question.question_id!r}")
        seen.add(question.question_id)
    if not questions:
        raise EvaluationError(f"{path} has no question")
    return questions


def load_benchmark(name: str, folder: Path | None = None) -> list[Question]:
    """Return a benchmark's questions with their references; `folder` as in benchmark_files."""
    home = BENCHMARKS[name]
    references = {
        str(line.question_id): tuple(line.choices[0].turns)
        for line in read_lines(
            find_benchmark_file(f"{home}/reference_answer/gpt-4.jsonl", folder), _ReferenceLine
        )
        if line.choices
    }
    return [
        question.model_copy(update={"reference": references.get(question.question_id, ())})
        for question in read_question_file(find_benchmark_file(f"{home}/question.jsonl", folder))
    ]


def held_out_questions() -> list[Question]:
    """Return the prompts that the check of the embedded model asks, by kind of their answers.

    Training with seed 0 saw none of their combinations.
    """
    corpus = Corpus(0, held_out=True, stream="")
    return [
        Question(
            question_id=str(number),
            category=example.kind,
            turns=(example.messages[-1].content,),
            history=example.messages[:-1],
            raw_prompt=example.raw_prompt,
        )
        for number, example in enumerate(corpus.examples(_NUM_HELD_OUT), start=1)
    ]


def load_prompts(name_or_path: str, folder: Path | None = None) -> list[Question]:
    """Return the questions of a benchmark by its name, the held-out prompts, or those of a file."""
    if name_or_path in BENCHMARKS:
        return load_benchmark(name_or_path, folder)
    if name_or_path == HELD_OUT:
        return held_out_questions()
    path = Path(name_or_path)
    if not path.is_file():
        names = ", ".join([*BENCHMARKS, HELD_OUT])
        raise EvaluationError(f"{name_or_path!r} is none of {names}, and no file of questions")
    return read_question_file(path)
