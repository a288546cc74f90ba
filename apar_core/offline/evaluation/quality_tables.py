"""Scores by category (the layout of the paper's tables 3 and 4), by turn, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from apar_core.offline.evaluation.judging import Judgment
from apar_core.offline.evaluation.paper_figures import MEAN, SCORED_MODELS, SCORES, category_label
from apar_core.offline.evaluation.report_table import Cell, Column, ReportTable

_TOKENS_PER_MILLION = 1e6


class TokenPrices(BaseModel):
    """Prices of the judge's tokens, in any currency; None where unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_per_million: NonNegativeFloat | None = None
    completion_per_million: NonNegativeFloat | None = None

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """Return the price of so many tokens, or None unless both prices are known."""
        if self.prompt_per_million is None or self.completion_per_million is None:
            return None
        return (
            prompt_tokens * self.prompt_per_million
            + completion_tokens * self.completion_per_million
        ) / _TOKENS_PER_MILLION


def score_table(
    prompts: str, models: Sequence[str], judgments: Sequence[Judgment], *, with_paper: bool
) -> ReportTable:
    """Return a row for each category and their mean, a column for each model.

    A mean is over judgments, so that categories of few questions count less, as in the paper.
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
    """Return the mean rating of each turn, and how many judgments gave none."""
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
        "Judgments without a rating are left out of every mean.",
    )


def cost_table(
    models: Sequence[str], judgments: Sequence[Judgment], prices: TokenPrices
) -> ReportTable:
    """Return requests and tokens of the judge for each model, and in all."""
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
    """Return the mean of the ratings that were given, or None without any."""
    ratings = [judgment.rating for judgment in judgments if judgment.rating is not None]
    return sum(ratings) / len(ratings) if ratings else None
