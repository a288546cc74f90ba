"""What a judge is asked, and what it answers: FastChat's single-answer grading.

Source: lm-sys/FastChat, fastchat/llm_judge (Zheng et al., arXiv 2306.05685).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from apar_core.errors import EvaluationError
from apar_core.json_lines import read_lines
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.benchmark_files import find_benchmark_file
from apar_core.offline.evaluation.prompt_sets import Question

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
