"""Single-answer grading by a judge model, as in FastChat; resumable.

Source: lm-sys/FastChat, fastchat/llm_judge (Zheng et al., arXiv 2306.05685).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from apar_core.errors import EvaluationError
from apar_core.json_lines import append_line, read_finished_lines, read_lines
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.chat_endpoint import ChatEndpoint, RequestFailedError, run_all
from apar_core.offline.evaluation.prompt_sets import Question, find_benchmark_file

REFERENCE_CATEGORIES = frozenset({"math", "reasoning", "coding"})
"""Categories whose answers are judged against a reference answer."""

MAX_JUDGED_TURNS = 2

_LOWEST_RATING, _HIGHEST_RATING = 1.0, 10.0
# The prompt asks for the first form. Like FastChat, we also accept the second.
_RATING_FORMS = (re.compile(r"\[\[(\d+(?:\.\d+)?)\]\]"), re.compile(r"\[(\d+(?:\.\d+)?)\]"))


class JudgePrompt(BaseModel):
    """A line of judge_prompts.jsonl."""

    model_config = ConfigDict(frozen=True)

    name: str
    system_prompt: str
    prompt_template: str


def load_judge_prompts(folder: Path | None = None) -> dict[str, JudgePrompt]:
    """Return the judge prompts by name; `folder` is as in `find_benchmark_file`.

    Raises EvaluationError if a prompt for single answers is missing.
    """
    path = find_benchmark_file("judge_prompts.jsonl", folder)
    prompts = {prompt.name: prompt for prompt in read_lines(path, JudgePrompt)}
    for turn in range(1, MAX_JUDGED_TURNS + 1):
        for with_reference in (False, True):
            name = prompt_name(turn, with_reference=with_reference)
            if name not in prompts:
                raise EvaluationError(f"{path} has no judge prompt {name!r}")
    return prompts


def needs_reference(question: Question) -> bool:
    """Return whether the answer is judged against a reference answer."""
    return question.category in REFERENCE_CATEGORIES and bool(question.reference)


def prompt_name(turn: int, *, with_reference: bool) -> str:
    """Return the name of the judge prompt for a turn (from 1)."""
    return ("single-math-v1" if with_reference else "single-v1") + ("-multi-turn" * (turn == 2))


def judge_chat(
    prompts: Mapping[str, JudgePrompt], question: Question, turn: int, answers: Sequence[str]
) -> tuple[ChatMessage, ...]:
    """Return the chat that asks for a rating of a turn's answer (`answers` up to that turn)."""
    prompt = prompts[prompt_name(turn, with_reference=needs_reference(question))]
    fields: dict[str, str] = {"question": question.turns[0], "answer": answers[0]}
    for number in range(turn):
        fields[f"question_{number + 1}"] = question.turns[number]
        fields[f"answer_{number + 1}"] = answers[number]
    for number, reference in enumerate(question.reference):
        fields[f"ref_answer_{number + 1}"] = reference
    try:
        text = prompt.prompt_template.format_map(fields)
    except KeyError as error:
        raise EvaluationError(
            f"question {question.question_id} has no {error.args[0]} for the judge prompt "
            f"{prompt.name!r}"
        ) from error
    return ChatMessage("system", prompt.system_prompt), ChatMessage("user", text)


def parse_rating(text: str) -> float | None:
    """Return the rating (1 to 10) in a judgment, or None."""
    for form in _RATING_FORMS:
        found = form.search(text)
        if found is not None:
            rating = float(found.group(1))
            return rating if _LOWEST_RATING <= rating <= _HIGHEST_RATING else None
    return None


# At temperature 0 the judge would repeat the judgment without a rating.
_REPEAT_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class JudgmentRequest:
    """Request options of a judgment; None is not sent.

    If `temperature` is 0, attempts after the first use 0.7.
    """

    max_tokens: int | None = 2048
    temperature: float | None = 0.0
    attempts: int = 3

    def temperature_of(self, attempt: int) -> float | None:
        """Return the temperature of an attempt (from 0)."""
        return _REPEAT_TEMPERATURE if attempt and self.temperature == 0 else self.temperature


class Judgment(BaseModel):
    """Judgment of one turn's answer; `rating` is None if the judge gave none.

    `requests` and token counts include all attempts.
    """

    model_config = ConfigDict(frozen=True)

    question_id: str
    turn: int
    model: str
    judge: str
    category: str
    prompt: str
    rating: float | None
    text: str
    requests: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def key(self) -> tuple[str, int, str, str]:
        """Unique key of the judgment."""
        return self.question_id, self.turn, self.model, self.judge


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """Answer to judge: the last of `texts`, the answers up to turn `turn` (from 1)."""

    question: Question
    turn: int
    model: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JudgingResult:
    """All judgments, including those of earlier runs, and why others are missing."""

    judgments: list[Judgment]
    failures: list[str]


def judged_answers(
    questions: Sequence[Question], model: str, texts: Mapping[str, Sequence[str]]
) -> list[JudgedAnswer]:
    """Return the answers to judge; `texts` has a model's answers by question id."""
    return [
        JudgedAnswer(question, turn, model, tuple(texts[question.question_id][:turn]))
        for question in questions
        for turn in range(1, 1 + min(MAX_JUDGED_TURNS, len(texts.get(question.question_id, ()))))
    ]


async def judge_all(
    endpoint: ChatEndpoint,
    prompts: Mapping[str, JudgePrompt],
    answers: Sequence[JudgedAnswer],
    path: Path,
    *,
    request: JudgmentRequest,
    show: Callable[[], None],
) -> JudgingResult:
    """Judge the answers without a judgment in the file; append each judgment to it.

    A judgment without a rating is repeated up to `request.attempts` times. `show` is called once
    per answer. Raises EvaluationError if no request can succeed.
    """
    wanted = {
        (answer.question.question_id, answer.turn, answer.model, endpoint.settings.model)
        for answer in answers
    }
    known = {line.key: line for line in read_finished_lines(path, Judgment) if line.key in wanted}
    failures: list[str] = []

    async def judge(answer: JudgedAnswer) -> None:
        key = (answer.question.question_id, answer.turn, answer.model, endpoint.settings.model)
        if key not in known:
            try:
                known[key] = await _judge(endpoint, prompts, answer, request)
                append_line(path, known[key])
            except RequestFailedError as error:
                failures.append(f"{answer.model}, question {key[0]}, turn {answer.turn}: {error}")
        show()

    await run_all(judge(answer) for answer in answers)
    return JudgingResult(list(known.values()), failures)


async def _judge(
    endpoint: ChatEndpoint,
    prompts: Mapping[str, JudgePrompt],
    answer: JudgedAnswer,
    request: JudgmentRequest,
) -> Judgment:
    question = answer.question
    chat = judge_chat(prompts, question, answer.turn, answer.texts)
    rating: float | None = None
    text = ""
    requests = prompt_tokens = completion_tokens = 0
    while rating is None and requests < request.attempts:
        completion = await endpoint.complete(
            chat,
            max_tokens=request.max_tokens,
            temperature=request.temperature_of(requests),
        )
        text, rating = completion.text, parse_rating(completion.text)
        requests += 1
        prompt_tokens += completion.prompt_tokens
        completion_tokens += completion.completion_tokens
    return Judgment(
        question_id=question.question_id,
        turn=answer.turn,
        model=answer.model,
        judge=endpoint.settings.model,
        category=question.category,
        prompt=prompt_name(answer.turn, with_reference=needs_reference(question)),
        rating=rating,
        text=text,
        requests=requests,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )
