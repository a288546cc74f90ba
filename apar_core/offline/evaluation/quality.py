"""`apar evaluate quality`: answers of a model, rated by a judge model as in FastChat; resumable.

Source: lm-sys/FastChat, fastchat/llm_judge (Zheng et al., arXiv 2306.05685), single-answer grading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from apar_core.errors import EvaluationError
from apar_core.intervals import of_sums
from apar_core.json_lines import append_line, read_finished_lines, read_lines
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.answer_files import AnswerLine
from apar_core.offline.evaluation.chat_endpoint import (
    ChatEndpoint,
    EndpointSettings,
    RequestFailedError,
    run_all,
)
from apar_core.offline.evaluation.layout import INTERVAL, columns
from apar_core.offline.evaluation.paper_figures import MEAN, SCORED_MODELS, SCORES, category_label
from apar_core.offline.evaluation.prompt_sets import Question, find_benchmark_file
from apar_core.reporting import (
    Cell,
    Column,
    Report,
    ReportTable,
    ShowProgress,
    file_name,
    write_report,
)

JUDGMENTS_FILE = "judgments.jsonl"

# As in FastChat's gen_model_answer.
_TEMPERATURES = {
    **{"writing": 0.7, "roleplay": 0.7, "stem": 0.1, "humanities": 0.1},
    **{"extraction": 0.0, "math": 0.0, "coding": 0.0, "reasoning": 0.0},
}
_OTHER_TEMPERATURE = 0.7

REFERENCE_CATEGORIES = frozenset({"math", "reasoning", "coding"})
"""Categories whose answers are judged against a reference answer."""

MAX_JUDGED_TURNS = 2

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
            return rating if 1 <= rating <= 10 else None
    return None


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
        # At temperature 0 the judge would repeat the judgment without a rating.
        return 0.7 if attempt and self.temperature == 0 else self.temperature


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


class GeneratedChoice(BaseModel):
    """Answers of one chat, one per turn."""

    index: int = 0
    turns: list[str]


class GeneratedAnswer(BaseModel):
    """Line of an answer file: FastChat's format with token counts."""

    question_id: int | str
    model_id: str
    choices: list[GeneratedChoice]
    prompt_tokens: int = 0
    completion_tokens: int = 0


class TokenPrices(BaseModel):
    """Prices of the judge's tokens in any currency; None if unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_per_million: NonNegativeFloat | None = None
    completion_per_million: NonNegativeFloat | None = None

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """Return the price of the tokens, or None if a price is unknown."""
        if self.prompt_per_million is None or self.completion_per_million is None:
            return None
        return (
            prompt_tokens * self.prompt_per_million
            + completion_tokens * self.completion_per_million
        ) / 1e6


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """Answers to judge, and the store; both `answer_files` and `model` may be given.

    A `temperature` of None means that of the category.
    """

    prompts: str
    questions: Sequence[Question]
    judge_prompts: Mapping[str, JudgePrompt]
    judge: EndpointSettings
    folder: Path
    answer_files: Sequence[Path] = ()
    model: EndpointSettings | None = None
    max_answer_tokens: int = 1024
    temperature: float | None = None
    judgment: JudgmentRequest = field(default_factory=JudgmentRequest)
    prices: TokenPrices = field(default_factory=TokenPrices)


class QualityResult(NamedTuple):
    """Report page, and why answers or judgments are missing from it."""

    page: Path
    report: Report
    failures: list[str]


async def run_quality(plan: QualityPlan, progress: ShowProgress) -> QualityResult:
    """Generate missing answers, judge them and write the report.

    Answers and judgments of an earlier run in the folder are reused. Raises EvaluationError if no
    request can succeed.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    files = list(plan.answer_files)
    failures: list[str] = []
    if plan.model is not None:
        files.append(plan.folder / f"answers_{file_name(plan.model.model)}.jsonl")
        failures += await _generate(plan, plan.model, files[-1], progress)
    answers = _read_answers(files, plan.questions)
    judgments, failed = await _judge_all(plan, answers, progress)
    models = list(dict.fromkeys(answer.model for answer in answers))
    unrated = sum(judgment.rating is None for judgment in judgments)
    report = Report(
        title=f"Generation quality on {plan.prompts}",
        facts={
            "Judge": f"{plan.judge.model} at {plan.judge.url}",
            "Judgments": f"{len(judgments)}, {unrated} of them without a rating",
        },
        tables=[
            score_table(plan.prompts, models, judgments),
            turn_table(models, judgments),
            *([difference_table(models, judgments)] if len(models) > 1 else []),
            cost_table(models, judgments, plan.prices),
        ],
        figures={},
        data={},
    )
    return QualityResult(write_report(report, plan.folder), report, [*failures, *failed])


async def _generate(
    plan: QualityPlan, settings: EndpointSettings, path: Path, progress: ShowProgress
) -> list[str]:
    """Answer the questions missing in the file; return the reasons of failures.

    A line is appended when all turns of its question are answered.
    """
    done = {str(line.question_id) for line in read_finished_lines(path, GeneratedAnswer)}
    failures: list[str] = []
    show = progress.start(f"answers of {settings.model}", len(plan.questions))

    async def answer(question: Question) -> None:
        if question.question_id not in done:
            temperature = plan.temperature
            if temperature is None:
                temperature = _TEMPERATURES.get(question.category, _OTHER_TEMPERATURE)
            try:
                line = await _answer(endpoint, question, plan.max_answer_tokens, temperature)
                append_line(path, line)
            except RequestFailedError as error:
                failures.append(f"question {question.question_id}: {error}")
        show()

    async with ChatEndpoint(settings) as endpoint:
        await run_all(answer(question) for question in plan.questions)
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


def _read_answers(files: Sequence[Path], questions: Sequence[Question]) -> list[JudgedAnswer]:
    answers: list[JudgedAnswer] = []
    for file in files:
        texts: dict[str, tuple[str, ...]] = {}
        model = file.stem.removeprefix("answer_")
        for line in read_lines(file, AnswerLine) if file.is_file() else ():
            question_id = str(line.question_id)
            if not line.turn_texts:
                raise EvaluationError(f"{file}: question {question_id} has no answer")
            texts[question_id] = line.turn_texts
            model = line.model_id or model
        found = [
            JudgedAnswer(question, turn, model, texts[question.question_id][:turn])
            for question in questions
            for turn in range(1, MAX_JUDGED_TURNS + 1)
            if turn <= len(texts.get(question.question_id, ()))
        ]
        if texts and not found:
            number = len({question.question_id for question in questions})
            raise EvaluationError(
                f"{file} answers none of the {number} questions; its first is {min(texts)}"
            )
        answers += found
    if not answers:
        raise EvaluationError(f"no answer to judge in {', '.join(map(str, files)) or 'no file'}")
    keys = {(answer.question.question_id, answer.turn, answer.model) for answer in answers}
    if len(keys) < len(answers):
        raise EvaluationError("two answer files belong to the same model")
    return answers


async def _judge_all(
    plan: QualityPlan, answers: Sequence[JudgedAnswer], progress: ShowProgress
) -> tuple[list[Judgment], list[str]]:
    """Return all judgments, including those of earlier runs, and why others are missing.

    Each new judgment is stored. One without a rating is repeated up to `attempts` times.
    """
    path = plan.folder / JUDGMENTS_FILE
    keys = [
        (each.question.question_id, each.turn, each.model, plan.judge.model) for each in answers
    ]
    wanted = set(keys)
    known = {line.key: line for line in read_finished_lines(path, Judgment) if line.key in wanted}
    failures: list[str] = []
    show = progress.start(f"judging by {plan.judge.model}", len(answers))

    async def judge(answer: JudgedAnswer, key: tuple[str, int, str, str]) -> None:
        if key not in known:
            try:
                known[key] = await _judge(endpoint, plan, answer)
                append_line(path, known[key])
            except RequestFailedError as error:
                failures.append(f"{answer.model}, question {key[0]}, turn {answer.turn}: {error}")
        show()

    async with ChatEndpoint(plan.judge) as endpoint:
        await run_all(judge(*each) for each in zip(answers, keys, strict=True))
    return list(known.values()), failures


async def _judge(endpoint: ChatEndpoint, plan: QualityPlan, answer: JudgedAnswer) -> Judgment:
    question = answer.question
    chat = judge_chat(plan.judge_prompts, question, answer.turn, answer.texts)
    rating: float | None = None
    text = ""
    requests = prompt_tokens = completion_tokens = 0
    while rating is None and requests < plan.judgment.attempts:
        completion = await endpoint.complete(
            chat,
            max_tokens=plan.judgment.max_tokens,
            temperature=plan.judgment.temperature_of(requests),
        )
        text, rating = completion.text, parse_rating(completion.text)
        requests += 1
        prompt_tokens += completion.prompt_tokens
        completion_tokens += completion.completion_tokens
    return Judgment(
        question_id=question.question_id,
        turn=answer.turn,
        model=answer.model,
        judge=plan.judge.model,
        category=question.category,
        prompt=prompt_name(answer.turn, with_reference=needs_reference(question)),
        rating=rating,
        text=text,
        requests=requests,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )


# ---- tables ------------------------------------------------------------------------------------


def score_table(prompts: str, models: Sequence[str], judgments: Sequence[Judgment]) -> ReportTable:
    """Return scores by category and model, in the layout of the paper's tables 3 and 4.

    The mean is over judgments, so categories of few questions count less, as in the paper.
    """
    paper = SCORES.get(prompts, {})
    titles = [*models, *(f"Paper {model}" for model in SCORED_MODELS if paper)]
    rows: list[tuple[Cell, ...]] = []
    for category in [*sorted({judgment.category for judgment in judgments}), None]:
        name = MEAN if category is None else category_label(category)
        chosen = [line for line in judgments if category is None or line.category == category]
        own = [mean_rating([line for line in chosen if line.model == model]) for model in models]
        rows.append((name, *own, *paper.get(name, (None,) * (len(titles) - len(models)))))
    judges = ", ".join(sorted({line.judge for line in judgments})) or "-"
    return ReportTable(
        f"scores_{prompts}",
        f"Generation quality: {prompts}",
        (Column("Task"), *(Column(title, ".2f") for title in titles)),
        tuple(rows),
        f"Ratings of 1 to 10 by {judges}; the paper's judge is GPT-4.",
    )


def turn_table(models: Sequence[str], judgments: Sequence[Judgment]) -> ReportTable:
    """Return the mean rating of each turn, and the number of judgments without a rating."""
    turns = sorted({judgment.turn for judgment in judgments})
    rows: list[tuple[Cell, ...]] = []
    for model in models:
        own = [judgment for judgment in judgments if judgment.model == model]
        by_turn = [mean_rating([line for line in own if line.turn == turn]) for turn in turns]
        unrated = sum(judgment.rating is None for judgment in own)
        sums_NK = _rating_sums(judgments, (model,))
        interval = None
        if sums_NK:
            mean = of_sums(sums_NK, lambda sums: sums[..., 0] / sums[..., -1], seed=0)
            interval = mean.interval(".2f")
        rows.append((model, *by_turn, mean_rating(own), interval, len(own), unrated))
    by_turn_header = "".join(f"Turn {turn} :.2f | " for turn in turns)
    return ReportTable(
        "turns",
        "Ratings by turn",
        columns(f"Model | {by_turn_header}Mean :.2f | {INTERVAL} | Judgments :d | No rating :d"),
        tuple(rows),
        "Means exclude judgments without a rating. Intervals are bootstrapped over questions.",
    )


def difference_table(models: Sequence[str], judgments: Sequence[Judgment]) -> ReportTable:
    """Return the difference of each other model's mean rating to that of the first one."""
    rows: list[tuple[Cell, ...]] = []
    for model in models[1:]:
        if sums_NK := _rating_sums(judgments, (model, models[0])):
            found = of_sums(
                sums_NK, lambda sums: (sums[..., 0] - sums[..., 1]) / sums[..., -1], seed=0
            )
            rows.append((model, len(sums_NK), found.value, found.interval("+.2f")))
    return ReportTable(
        "differences",
        f"Mean ratings compared with {models[0]}",
        columns(f"Model | Questions :d | Difference :+.2f | {INTERVAL}"),
        tuple(rows),
        "Of the questions that both models have a rating for. Intervals are bootstrapped over "
        "questions, with the ratings of both models for a question together.",
    )


def _rating_sums(judgments: Sequence[Judgment], models: Sequence[str]) -> list[list[float]]:
    """Return sums for each question over the turns that all models have a rating for.

    For a question: the ratings of each model, and the number of turns.
    """
    ratings: dict[str, dict[int, dict[str, float]]] = {}
    for line in judgments:
        if line.rating is not None:
            turns = ratings.setdefault(line.question_id, {})
            turns.setdefault(line.turn, {})[line.model] = line.rating
    sums_NK: list[list[float]] = []
    for turns in ratings.values():
        rated = [each for each in turns.values() if each.keys() >= set(models)]
        if rated:
            by_model = [sum(each[model] for each in rated) for model in models]
            sums_NK.append([*by_model, len(rated)])
    return sums_NK


def cost_table(
    models: Sequence[str], judgments: Sequence[Judgment], prices: TokenPrices
) -> ReportTable:
    """Return the judge's requests and tokens for each model and in total."""
    groups = [(model, [line for line in judgments if line.model == model]) for model in models]
    rows: list[tuple[Cell, ...]] = []
    for name, lines in [*groups, ("All", list(judgments))]:
        prompt = sum(line.prompt_tokens for line in lines)
        completion = sum(line.completion_tokens for line in lines)
        requests = sum(line.requests for line in lines)
        rows.append((name, requests, prompt, completion, prices.cost(prompt, completion)))
    return ReportTable(
        "cost",
        "What judging cost",
        columns(
            "Judged model | Requests :d | Prompt tokens :,d | Completion tokens :,d | Price :.2f"
        ),
        tuple(rows),
    )


def mean_rating(judgments: Sequence[Judgment]) -> float | None:
    """Return the mean of all ratings, or None if there are none."""
    ratings = [judgment.rating for judgment in judgments if judgment.rating is not None]
    return sum(ratings) / len(ratings) if ratings else None
