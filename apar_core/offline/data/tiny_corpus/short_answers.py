"""Questions whose answers are too short or too connected to fork: facts, sums, code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache


import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

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
    """One answer and the questions that it fits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    questions: tuple[str, ...]
    answer: str


class ShortAnswers(BaseModel):
    """The content of short_answers.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    capitals: dict[str, str]
    definitions: dict[str, str]
    small_talk: tuple[Reply, ...]
    facts: tuple[Reply, ...]


class CodeAnswer(BaseModel):
    """A programming task and a function that solves it."""

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
    """Yield (question, answer) of greetings and questions about the model itself."""
    for reply in load_short_answers().small_talk:
        yield from ((question, reply.answer) for question in reply.questions)


def fact_replies() -> Iterator[tuple[str, str]]:
    """Yield (question, answer) of capitals, definitions and single facts."""
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
    """Yield (question, answer) of sums, differences and products of small numbers."""
    for expression, equation in _sums():
        yield from ((wording.format(expression), equation) for wording in _SUM_WORDINGS)


def code_replies() -> Iterator[tuple[str, str]]:
    """Yield (question, answer) of programming tasks."""
    for answer in load_code_answers():
        block = f"```python\n{answer.code.rstrip()}\n```"
        yield from ((wording.format(answer.task), block) for wording in _CODE_WORDINGS)
