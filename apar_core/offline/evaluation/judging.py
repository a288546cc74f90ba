"""Single-answer grading of many answers by a judge, resumable."""

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
"""Categories whose answers are judged beside a reference answer."""

MAX_JUDGED_TURNS = 2

_LOWEST_RATING, _HIGHEST_RATING = 1.0, 10.0
# The judge is asked for the first form; FastChat accepts the second one too.
_RATING_FORMS = (re.compile(r"\[\[(\d+(?:\.\d+)?)\]\]"), re.compile(r"\[(\d+(?:\.\d+)?)\]"))


class JudgePrompt(BaseModel):
    """A line of judge_prompts.jsonl."""

    model_config = ConfigDict(frozen=True)

    name: str
    system_prompt: str
    prompt_template: str


def load_judge_prompts(folder: Path | None = None) -> dict[str, JudgePrompt]:
    """Return the judge prompts by name; `folder` as in benchmark_files.

    Raises EvaluationError if one of those for single answers is missing.
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
    """Whether the answer is judged beside a reference answer, which the question must then have."""
    return question.category in REFERENCE_CATEGORIES and bool(question.reference)


def prompt_name(turn: int, *, with_reference: bool) -> str:
    """Return the name of the judge prompt for a turn (from 1)."""
    return ("single-math-v1" if with_reference else "single-v1") + ("-multi-turn" * (turn == 2))


def judge_chat(
    prompts: Mapping[str, JudgePrompt], question: Question, turn: int, answers: Sequence[str]
) -> tuple[ChatMessage, ...]:
    """Return the chat that asks for a rating of one turn's answer, given all answers up to it."""
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
    """Return the rating from 1 to 10 in a judgment, or None if it gives none."""
    for form in _RATING_FORMS:
        found = form.search(text)
        if found is not None:
            rating = float(found.group(1))
            return rating if _LOWEST_RATING <= rating <= _HIGHEST_RATING else None
    return None


# A greedy judge would give the same judgment without a rating again.
_REPEAT_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class JudgmentRequest:
    """How a judgment is asked for; a field of None is not sent.

    `max_tokens` limits a judgment. `temperature` is that of the first attempt at a rating; where it
    is 0, further attempts have 0.7.
    """

    max_tokens: int | None = 2048
    temperature: float | None = 0.0
    attempts: int = 3

    def temperature_of(self, attempt: int) -> float | None:
        """Return the temperature of an attempt, counted from 0."""
        return _REPEAT_TEMPERATURE if attempt and self.temperature == 0 else self.temperature


class Judgment(BaseModel):
    """What a judge said of one turn's answer; `rating` is None where it gave none.

    `requests` and the tokens count all that were made for this judgment.
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
        """What tells judgments apart."""
        return self.question_id, self.turn, self.model, self.judge


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """The answer to judge: that of turn `turn` (from 1), behind those of the turns before it."""

    question: Question
    turn: int
    model: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JudgingResult:
    """All judgments there are, old and new, and why others are missing."""

    judgments: list[Judgment]
    failures: list[str]


def judged_answers(
    questions: Sequence[Question], model: str, texts: Mapping[str, Sequence[str]]
) -> list[JudgedAnswer]:
    """Return what there is to judge of a model's answers, given by question id and turn."""
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
    show: Callable[[Judgment | None], None],
) -> JudgingResult:
    """Judge the answers that the file has no judgment of; append each one as it comes.

    A judgment without a rating is asked for up to `request.attempts` times and then kept as it is.
    `show` is called once an answer, with None where judging failed. Raises EvaluationError where no
    request can succeed.
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
        show(known.get(key))

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
