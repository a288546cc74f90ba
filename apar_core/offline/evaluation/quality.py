"""Quality evaluation: generate the answers of a model, have them judged, and report the scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from apar_core.errors import EvaluationError
from apar_core.json_lines import append_line, read_finished_lines, read_lines
from apar_core.offline.evaluation.answer_files import AnswerLine
from apar_core.offline.evaluation.chat_endpoint import (
    ChatEndpoint,
    EndpointSettings,
    RequestFailedError,
    run_all,
)
from apar_core.offline.evaluation.judging import (
    JudgedAnswer,
    JudgePrompt,
    Judgment,
    JudgmentRequest,
    judge_all,
    judged_answers,
)
from apar_core.offline.evaluation.paper_figures import MEAN, SCORED_MODELS, SCORES, category_label
from apar_core.offline.evaluation.prompt_sets import Question
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


async def generate_answers(
    endpoint: ChatEndpoint,
    questions: Sequence[Question],
    path: Path,
    *,
    max_tokens: int,
    temperature: float | None,
    show: Callable[[], None],
) -> list[str]:
    """Answer the questions missing in the file; return the reasons of failures.

    A line is appended when all turns of its question are answered. A `temperature` of None means
    that of the category. `show` is called once per question. Raises EvaluationError if no request
    can succeed.
    """
    done = {str(line.question_id) for line in read_finished_lines(path, GeneratedAnswer)}
    failures: list[str] = []

    async def answer(question: Question) -> None:
        if question.question_id not in done:
            by_category = _TEMPERATURES.get(question.category, _OTHER_TEMPERATURE)
            chosen = by_category if temperature is None else temperature
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


def score_table(
    prompts: str, models: Sequence[str], judgments: Sequence[Judgment], *, with_paper: bool
) -> ReportTable:
    """Return scores by category and model, in the layout of the paper's tables 3 and 4.

    The mean is over judgments, so categories of few questions count less, as in the paper.
    """
    categories = sorted({judgment.category for judgment in judgments})
    paper = SCORES.get(prompts, {}) if with_paper else {}
    paper_columns = [Column(f"Paper {model}", ".2f") for model in SCORED_MODELS if paper]
    rows: list[tuple[Cell, ...]] = []
    for category in [*categories, None]:
        name = MEAN if category is None else category_label(category)
        chosen = [line for line in judgments if category is None or line.category == category]
        own = [mean_rating([line for line in chosen if line.model == model]) for model in models]
        rows.append((name, *own, *paper.get(name, (None,) * len(paper_columns))))
    return ReportTable(
        f"scores_{prompts}",
        f"Generation quality: {prompts}",
        (Column("Task"), *(Column(model, ".2f") for model in models), *paper_columns),
        tuple(rows),
        f"Ratings of 1 to 10 by {', '.join(sorted({line.judge for line in judgments})) or '-'}; "
        "the paper's judge is GPT-4.",
    )


def turn_table(models: Sequence[str], judgments: Sequence[Judgment]) -> ReportTable:
    """Return the mean rating of each turn, and the number of judgments without a rating."""
    turns = sorted({judgment.turn for judgment in judgments})
    rows: list[tuple[Cell, ...]] = []
    for model in models:
        own = [judgment for judgment in judgments if judgment.model == model]
        by_turn = [mean_rating([line for line in own if line.turn == turn]) for turn in turns]
        unrated = sum(judgment.rating is None for judgment in own)
        rows.append((model, *by_turn, mean_rating(own), len(own), unrated))
    return ReportTable(
        "turns",
        "Ratings by turn",
        (
            Column("Model"),
            *(Column(f"Turn {turn}", ".2f") for turn in turns),
            Column("Mean", ".2f"),
            Column("Judgments", "d"),
            Column("No rating", "d"),
        ),
        tuple(rows),
        "Means exclude judgments without a rating.",
    )


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
        (
            Column("Judged model"),
            Column("Requests", "d"),
            Column("Prompt tokens", ",d"),
            Column("Completion tokens", ",d"),
            Column("Price", ".2f"),
        ),
        tuple(rows),
    )


def mean_rating(judgments: Sequence[Judgment]) -> float | None:
    """Return the mean of all ratings, or None if there are none."""
    ratings = [judgment.rating for judgment in judgments if judgment.rating is not None]
    return sum(ratings) / len(ratings) if ratings else None


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """Answers to judge, and the store; both `answer_files` and `model` may be given."""

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
    with_paper: bool = True


@dataclass(frozen=True, slots=True)
class QualityResult:
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
        path = plan.folder / f"answers_{file_name(plan.model.model)}.jsonl"
        failures += await _generate(plan, plan.model, path, progress)
        files.append(path)
    answers = _read_answers(files, plan.questions)
    step = progress.start(f"judging by {plan.judge.model}", len(answers))
    async with ChatEndpoint(plan.judge) as judge:
        result = await judge_all(
            judge,
            plan.judge_prompts,
            answers,
            plan.folder / JUDGMENTS_FILE,
            request=plan.judgment,
            show=step,
        )
    judgments = result.judgments
    report = _report(plan, list(dict.fromkeys(answer.model for answer in answers)), judgments)
    return QualityResult(write_report(report, plan.folder), report, [*failures, *result.failures])


async def _generate(
    plan: QualityPlan, settings: EndpointSettings, path: Path, progress: ShowProgress
) -> list[str]:
    step = progress.start(f"answers of {settings.model}", len(plan.questions))
    async with ChatEndpoint(settings) as endpoint:
        return await generate_answers(
            endpoint,
            plan.questions,
            path,
            max_tokens=plan.max_answer_tokens,
            temperature=plan.temperature,
            show=step,
        )


def _read_answers(files: Sequence[Path], questions: Sequence[Question]) -> list[JudgedAnswer]:
    answers: list[JudgedAnswer] = []
    known = {question.question_id for question in questions}
    for file in files:
        texts: dict[str, tuple[str, ...]] = {}
        model = file.stem.removeprefix("answer_")
        for line in read_lines(file, AnswerLine) if file.is_file() else ():
            question_id = str(line.question_id)
            if not line.turn_texts:
                raise EvaluationError(f"{file}: question {question_id} has no answer")
            texts[question_id] = line.turn_texts
            model = line.model_id or model
        found = judged_answers(questions, model, texts)
        if texts and not found:
            raise EvaluationError(
                f"{file} answers none of the {len(known)} questions; its first is {min(texts)}"
            )
        answers += found
    if not answers:
        raise EvaluationError(f"no answer to judge in {', '.join(map(str, files)) or 'no file'}")
    keys = {(answer.question.question_id, answer.turn, answer.model) for answer in answers}
    if len(keys) < len(answers):
        raise EvaluationError("two answer files belong to the same model")
    return answers


def _report(plan: QualityPlan, models: list[str], judgments: list[Judgment]) -> Report:
    unrated = sum(judgment.rating is None for judgment in judgments)
    tables = [
        score_table(plan.prompts, models, judgments, with_paper=plan.with_paper),
        turn_table(models, judgments),
        cost_table(models, judgments, plan.prices),
    ]
    return Report(
        title=f"Generation quality on {plan.prompts}",
        facts={
            "Judge": f"{plan.judge.model} at {plan.judge.url}",
            "Judgments": f"{len(judgments)}, {unrated} of them without a rating",
        },
        tables=tables,
        figures={},
        data={},
    )
