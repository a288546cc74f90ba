"""`apar evaluate quality`: answers of models, rated by a judge."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console

from apar_core.errors import EvaluationError
from cluster.cli.evaluation_progress import clear_errors, rich_table, stage_progress

if TYPE_CHECKING:
    from apar_core.offline.evaluation.chat_endpoint import EndpointSettings
    from apar_core.offline.evaluation.quality import QualityPlan

_SHOWN_FAILURES = 5

Judge = Annotated[
    str, typer.Option(help="Base URL of the judge's OpenAI-compatible endpoint (with /v1).")
]
JudgeModel = Annotated[str, typer.Option(help="Name of the judge.")]
JudgeKey = Annotated[str, typer.Option(help="Environment variable that holds the judge's API key.")]
Answers = Annotated[
    list[Path] | None,
    typer.Option(
        "--answers", help="Answers to judge, in FastChat's form; several files for several models."
    ),
]
ModelEndpoint = Annotated[
    str | None, typer.Option(help="Base URL of an endpoint that answers the questions first.")
]
ModelName = Annotated[str | None, typer.Option("--model", help="Name of the model there.")]
ModelKey = Annotated[str, typer.Option(help="Environment variable that holds its API key.")]
Prompts = Annotated[str, typer.Option(help="vicuna-bench, mt-bench or a file of questions.")]
Questions = Annotated[
    Path | None,
    typer.Option(
        help="Folder of FastChat's files; what apar evaluate fetch fetched by default.",
        file_okay=False,
    ),
]
Out = Annotated[
    Path, typer.Option(help="Folder of answers, judgments and report.", file_okay=False)
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first questions.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests under way at once.")]
Retries = Annotated[int, typer.Option(min=0, help="Retries of a failed request, with backoff.")]
RatingAttempts = Annotated[
    int, typer.Option(min=1, help="How often a judgment without a rating is asked for.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of a generated answer.")]
MaxJudgmentTokens = Annotated[
    int, typer.Option(min=0, help="Most tokens of a judgment; 0 sends no limit.")
]
JudgeTokenField = Annotated[
    str,
    typer.Option(
        help="Field for --max-judgment-tokens: max_tokens, or max_completion_tokens, which "
        "reasoning judges take."
    ),
]
JudgeTemperature = Annotated[
    str,
    typer.Option(
        help="Temperature of the judge. A further attempt at a rating has 0.7 instead of 0. "
        "none sends no temperature, for reasoning judges."
    ),
]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, help="Of the answers; FastChat's by category by default.")
]
PromptPrice = Annotated[
    float | None, typer.Option(min=0.0, help="Price of a million of the judge's prompt tokens.")
]
CompletionPrice = Annotated[
    float | None, typer.Option(min=0.0, help="Price of a million of the judge's answer tokens.")
]


def quality(
    judge: Judge,
    judge_model: JudgeModel,
    out: Out,
    prompts: Prompts = "mt-bench",
    answers: Answers = None,
    model_endpoint: ModelEndpoint = None,
    model: ModelName = None,
    questions: Questions = None,
    limit: Limit = None,
    judge_key_env: JudgeKey = "OPENAI_API_KEY",
    model_key_env: ModelKey = "APAR_API_KEY",
    concurrency: Concurrency = 8,
    retries: Retries = 5,
    rating_attempts: RatingAttempts = 3,
    max_tokens: MaxTokens = 1024,
    max_judgment_tokens: MaxJudgmentTokens = 2048,
    judge_token_field: JudgeTokenField = "max_tokens",
    judge_temperature: JudgeTemperature = "0",
    temperature: Temperature = None,
    prompt_price: PromptPrice = None,
    completion_price: CompletionPrice = None,
) -> None:
    """Let a judge rate answers from 1 to 10, as FastChat's single-answer grading does.

    Answers come from files, or from an endpoint, or both. Run the same command again to go on
    where it was interrupted.
    """
    from apar_core.offline.evaluation.judging import JudgmentRequest, load_judge_prompts
    from apar_core.offline.evaluation.prompt_sets import load_prompts
    from apar_core.offline.evaluation.quality import QualityPlan, TokenPrices

    console = Console(stderr=True)
    with clear_errors(console):
        plan = QualityPlan(
            prompts=prompts,
            questions=load_prompts(prompts, questions)[:limit],
            judge_prompts=load_judge_prompts(questions),
            judge=_endpoint(judge, judge_model, judge_key_env, concurrency, retries).model_copy(
                update={"token_limit_field": _token_field(judge_token_field)}
            ),
            folder=out,
            answer_files=answers or (),
            model=_model(model_endpoint, model, model_key_env, concurrency, retries),
            max_answer_tokens=max_tokens,
            temperature=temperature,
            judgment=JudgmentRequest(
                max_tokens=max_judgment_tokens or None,
                temperature=_temperature(judge_temperature),
                attempts=rating_attempts,
            ),
            prices=TokenPrices(
                prompt_per_million=prompt_price, completion_per_million=completion_price
            ),
        )
        _run(console, plan)


def _token_field(name: str) -> str:
    from apar_core.offline.evaluation.chat_endpoint import TokenLimitField

    known = get_args(TokenLimitField)
    if name not in known:
        raise EvaluationError(f"--judge-token-field {name!r} is none of {', '.join(known)}")
    return name


def _temperature(text: str) -> float | None:
    if text == "none":
        return None
    try:
        temperature = float(text)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature < math.inf:
        raise EvaluationError(
            f"--judge-temperature {text!r} is neither a number of at least 0 nor none"
        )
    return temperature


def _model(
    url: str | None, model: str | None, key_env: str, concurrency: int, retries: int
) -> EndpointSettings | None:
    if url is None:
        return None
    if model is None:
        raise EvaluationError(f"--model-endpoint {url} needs the name of its --model")
    return _endpoint(url, model, key_env, concurrency, retries)


def _endpoint(
    url: str, model: str, key_env: str, concurrency: int, retries: int
) -> EndpointSettings:
    from apar_core.offline.evaluation.chat_endpoint import EndpointSettings

    if not url.startswith(("http://", "https://")):
        raise EvaluationError(f"{url!r} is no URL: it has to begin with http:// or https://")
    return EndpointSettings(
        url=url,
        model=model,
        # Servers of one's own ask for no key, but the client wants one.
        api_key=os.environ.get(key_env) or "none",
        concurrency=concurrency,
        retries=retries,
    )


def _run(console: Console, plan: QualityPlan) -> None:
    from apar_core.offline.evaluation.quality import run_quality

    if not plan.answer_files and plan.model is None:
        raise EvaluationError("nothing to judge: give --answers FILE or --model-endpoint URL")
    with stage_progress(console) as progress:
        result = asyncio.run(run_quality(plan, progress))
    output = Console()
    for table in result.report.tables:
        output.print(rich_table(table))
    output.print(f"Report: [bold]{result.page}[/bold]", soft_wrap=True)
    if result.failures:
        shown = "\n".join(result.failures[:_SHOWN_FAILURES])
        raise EvaluationError(
            f"{len(result.failures)} failed; run the same command again to go on:\n{shown}"
        )
