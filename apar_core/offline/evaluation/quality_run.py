"""From questions to a table of scores: answers of models, judged and reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from apar_core.errors import EvaluationError
from apar_core.json_lines import read_lines
from apar_core.offline.evaluation.answer_files import AnswerLine
from apar_core.offline.evaluation.answer_generation import generate_answers
from apar_core.offline.evaluation.chat_endpoint import ChatEndpoint, EndpointSettings
from apar_core.offline.evaluation.judge_prompts import JudgePrompt
from apar_core.offline.evaluation.judging import (
    JudgedAnswer,
    Judgment,
    JudgmentRequest,
    judge_all,
    judged_answers,
)
from apar_core.offline.evaluation.progress import ShowProgress
from apar_core.offline.evaluation.prompt_sets import Question
from apar_core.offline.evaluation.quality_tables import (
    TokenPrices,
    cost_table,
    score_table,
    turn_table,
)
from apar_core.offline.evaluation.report_files import Report, file_name, write_report

JUDGMENTS_FILE = "judgments.jsonl"


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """What is judged and where it is kept. `answer_files` and `model` may both be given."""

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
    """The page of the report, and why some answers or judgments are missing from it."""

    page: Path
    report: Report
    failures: list[str]


async def run_quality(plan: QualityPlan, progress: ShowProgress) -> QualityResult:
    """Generate what answers are missing, judge them, and write the report.

    What a run before it has left in the folder is not asked for again. Raises EvaluationError
    where nothing can succeed.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    files = list(plan.answer_files)
    failures: list[str] = []
    if plan.model is not None:
        path = plan.folder / f"answers_{file_name(plan.model.model)}.jsonl"
        failures += await _generate(plan, plan.model, path, progress)
        files.append(path)
    answers = _read_answers(files, plan.questions)
    judgments = []
    step = progress.start(f"judging by {plan.judge.model}", len(answers))
    async with ChatEndpoint(plan.judge) as judge:
        result = await judge_all(
            judge,
            plan.judge_prompts,
            answers,
            plan.folder / JUDGMENTS_FILE,
            request=plan.judgment,
            show=lambda _judgment: step(),
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
    if len({_key(answer) for answer in answers}) < len(answers):
        raise EvaluationError("two answer files are of the same model")
    return answers


def _key(answer: JudgedAnswer) -> tuple[str, int, str]:
    return answer.question.question_id, answer.turn, answer.model


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
            "Judgments": f"{len(judgments)}, of them {unrated} without a rating",
        },
        tables=tables,
        figures={},
        data={},
    )
