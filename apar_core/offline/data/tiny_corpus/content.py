"""Hand-written content of the corpus, read from the YAML files next to this module.

Topics have answers that fork. Facts, sums and code have answers too short or too connected to fork.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

NUM_POINTS = 8

_FOLDER = Path(__file__).parent


def _columns(*names: str) -> BeforeValidator:
    """Parse lines such as "title | detail" into the named fields of a model."""

    def parse(value: object) -> object:
        if not isinstance(value, str):
            return value
        columns: list[str] = [part.strip() for part in value.split("|")]
        return dict(zip(names, columns, strict=True))

    return BeforeValidator(parse)


def _numbers(value: object) -> object:
    return tuple(int(part) for part in value.split()) if isinstance(value, str) else value


class Point(BaseModel):
    """Tip or fact: a short title and its detail."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str = Field(min_length=3)
    detail: str = Field(min_length=3)


class Passage(BaseModel):
    """Paragraph: topic sentence and rest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sentence: str = Field(min_length=3)
    rest: str = Field(min_length=3)


class Stage(BaseModel):
    """Section of a guide: title, leading sentence and numbers of its points (from 1)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    lead: str
    points: Annotated[
        tuple[Annotated[int, Field(ge=1, le=NUM_POINTS)], ...], BeforeValidator(_numbers)
    ] = Field(min_length=1)


class Topic(BaseModel):
    """All content about one topic.

    `name` completes "tips for" or "facts about", depending on `item`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    item: Literal["tip", "fact"] = "tip"
    points: tuple[Annotated[Point, _columns("title", "detail")], ...] = Field(
        alias="tips", min_length=NUM_POINTS, max_length=NUM_POINTS
    )
    passages: tuple[Annotated[Passage, _columns("sentence", "rest")], ...] = Field(
        alias="paragraphs", min_length=3, max_length=3
    )
    stages: tuple[Annotated[Stage, _columns("title", "lead", "points")], ...] = Field(
        min_length=2, max_length=3
    )
    closing: str


@cache
def load_topics() -> tuple[Topic, ...]:
    """Return all topics, ordered by file name."""
    return tuple(
        Topic.model_validate(entry)
        for path in sorted(_FOLDER.glob("topics_*.yaml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    )


_LARGEST_ADDEND = 20
_LARGEST_FACTOR = 10

_CAPITAL_WORDINGS = (
    "What is the capital of {}?",
    "Name the capital of {}.",
    "Which city is the capital of {}?",
    "Tell me the capital of {}.",
    "What's the capital city of {}?",
)
_DEFINITION_WORDINGS = (
    "What is {}?",
    "Define {}.",
    "Explain in one sentence what {} is.",
    "What do you understand by {}?",
    "Give me a short definition of {}.",
)
_SUM_WORDINGS = (
    "What is {}?",
    "Calculate {}.",
    "How much is {}?",
    "{} = ?",
    "Please compute {}.",
)
_CODE_WORDINGS = (
    "Write a Python function that {}.",
    "Give me a Python function that {}.",
    "Show me Python code that {}.",
    "I need a function in Python that {}.",
    "Can you write a Python function that {}?",
)


class Reply(BaseModel):
    """Answer with its questions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    questions: tuple[str, ...]
    answer: str


class ShortAnswers(BaseModel):
    """Content of short_answers.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    capitals: dict[str, str]
    definitions: dict[str, str]
    small_talk: tuple[Reply, ...]
    facts: tuple[Reply, ...]


class CodeAnswer(BaseModel):
    """Programming task and a function that solves it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    code: str


@cache
def load_short_answers() -> ShortAnswers:
    """Return the facts, definitions and small talk."""
    text = (_FOLDER / "short_answers.yaml").read_text(encoding="utf-8")
    return ShortAnswers.model_validate(yaml.safe_load(text))


@cache
def load_code_answers() -> tuple[CodeAnswer, ...]:
    """Return the programming tasks."""
    text = (_FOLDER / "code_answers.yaml").read_text(encoding="utf-8")
    return tuple(TypeAdapter(list[CodeAnswer]).validate_python(yaml.safe_load(text)))


def small_talk_replies() -> Iterator[tuple[str, str]]:
    """Yield (question, answer) pairs of greetings and questions about the model."""
    for reply in load_short_answers().small_talk:
        yield from ((question, reply.answer) for question in reply.questions)


def fact_replies() -> Iterator[tuple[str, str]]:
    """Yield (question, answer) pairs about capitals, definitions and single facts."""
    content = load_short_answers()
    for country, city in content.capitals.items():
        end = "" if city.endswith(".") else "."
        sentence = f"The capital of {country} is {city}{end}"
        yield from ((wording.format(country), sentence) for wording in _CAPITAL_WORDINGS)
    for term, definition in content.definitions.items():
        yield from ((wording.format(term), definition) for wording in _DEFINITION_WORDINGS)
    for reply in content.facts:
        yield from ((question, reply.answer) for question in reply.questions)


def _sums() -> Iterator[tuple[str, str]]:
    for a in range(_LARGEST_ADDEND + 1):
        for b in range(_LARGEST_ADDEND + 1):
            yield f"{a} + {b}", f"{a} + {b} = {a + b}"
            if a >= b:
                yield f"{a} - {b}", f"{a} - {b} = {a - b}"
            if 0 < a <= _LARGEST_FACTOR and 0 < b <= _LARGEST_FACTOR:
                yield f"{a} x {b}", f"{a} x {b} = {a * b}"


def arithmetic_replies() -> Iterator[tuple[str, str]]:
    """Yield (question, answer) pairs of sums, differences and products of small numbers."""
    for expression, equation in _sums():
        yield from ((wording.format(expression), equation) for wording in _SUM_WORDINGS)


def code_replies() -> Iterator[tuple[str, str]]:
    """Yield (question, answer) pairs of programming tasks."""
    for answer in load_code_answers():
        block = f"```python\n{answer.code.rstrip()}\n```"
        yield from ((wording.format(answer.task), block) for wording in _CODE_WORDINGS)
