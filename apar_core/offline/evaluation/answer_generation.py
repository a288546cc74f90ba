"""The answers of a model behind an endpoint, kept in FastChat's form as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel

from apar_core.json_lines import append_line, read_finished_lines
from apar_core.offline.evaluation.chat_endpoint import ChatEndpoint, RequestFailedError, run_all
from apar_core.offline.evaluation.prompt_sets import Question

# As in FastChat's gen_model_answer; other categories get the last value.
_TEMPERATURES = {
    **{"writing": 0.7, "roleplay": 0.7, "stem": 0.1, "humanities": 0.1},
    **{"extraction": 0.0, "math": 0.0, "coding": 0.0, "reasoning": 0.0},
}
_OTHER_TEMPERATURE = 0.7


class GeneratedChoice(BaseModel):
    """The answers of one chat, one a turn."""

    index: int = 0
    turns: list[str]


class GeneratedAnswer(BaseModel):
    """A line of an answer file: FastChat's, with the tokens that it cost."""

    question_id: int | str
    model_id: str
    choices: list[GeneratedChoice]
    prompt_tokens: int = 0
    completion_tokens: int = 0


def temperature_of(category: str) -> float:
    """Return FastChat's temperature for answers of a category."""
    return _TEMPERATURES.get(category, _OTHER_TEMPERATURE)


async def generate_answers(
    endpoint: ChatEndpoint,
    questions: Sequence[Question],
    path: Path,
    *,
    max_tokens: int,
    temperature: float | None,
    show: Callable[[], None],
) -> list[str]:
    """Answer the questions that the file lacks; return the reasons of those that failed.

    A line is appended as soon as all turns of its question are answered. `temperature` None stands
    for that of the category; `show` is called once a question. Raises EvaluationError where no
    request can succeed.
    """
    done = {str(line.question_id) for line in read_finished_lines(path, GeneratedAnswer)}
    failures: list[str] = []

    async def answer(question: Question) -> None:
        if question.question_id not in done:
            chosen = temperature_of(question.category) if temperature is None else temperature
            try:
                line = await _answer(endpoint, question, max_tokens, chosen)
                append_line(path, line)
            except RequestFailedError as error:
                failures.append(f"question {question.question_id}: {error}")
        show()

    await run_all(answer(question) for question in questions)
    return failures


async def _answer(
    endpoint: ChatEndpoint, question: Question, max_tokens: int, temperature: float
) -> GeneratedAnswer:
    turns: list[str] = []
    prompt_tokens = completion_tokens = 0
    for turn in range(len(question.turns)):
        completion = await endpoint.complete(
            question.messages(turn, tuple(turns)), max_tokens=max_tokens, temperature=temperature
        )
        turns.append(completion.text)
        prompt_tokens += completion.prompt_tokens
        completion_tokens += completion.completion_tokens
    return GeneratedAnswer(
        question_id=question.question_id,
        model_id=endpoint.settings.model,
        choices=[GeneratedChoice(turns=turns)],
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )
