"""The ways of answering that are compared, and the questions that are put to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apar_core.errors import EvaluationError
from apar_core.offline.data.structure import extract_tree
from apar_core.workload.trace import read_trace
from cluster.experiments.experiment_engine import Policy
from cluster.experiments.peers.client_forking import ClientForking
from cluster.experiments.peers.parent_stops import ParentStops
from cluster.experiments.peers.skeleton_of_thought import (
    SkeletonOfThought,
    SkeletonPrompts,
    skeleton_prompts,
)
from cluster.experiments.program import OneRequest, Program

if TYPE_CHECKING:
    from apar_core.workload.replay_answers import AnswerText, ReplayAnswer

SEQUENTIAL = "sequential"
ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class Question:
    """A recorded answer, and what skeleton-of-thought asks for it."""

    answer: ReplayAnswer
    prompts: SkeletonPrompts


@dataclass(frozen=True, slots=True)
class Method:
    """A way of answering; `policy` is the fork policy that the engine has meanwhile."""

    name: str
    title: str
    build: Callable[[Question, int], Program]
    policy: Policy = "eager"
    is_ours: bool = False


METHODS = {
    method.name: method
    for method in (
        Method(SEQUENTIAL, "sequential (vLLM)", lambda q, _: OneRequest(q.answer, forks=False)),
        Method(
            "client-forking",
            "client-side forking (PaDoc, ThreadWeaver)",
            lambda q, marker: ClientForking(q.answer, marker),
        ),
        Method(
            "skeleton",
            "skeleton-of-thought",
            lambda q, marker: SkeletonOfThought(q.answer, marker, q.prompts),
        ),
        Method(
            "parent-stops",
            "parent stops, resubmitted",
            lambda q, marker: ParentStops(q.answer, marker),
        ),
        Method(
            "parent-stops-free",
            "parent stops, free merge (Multiverse, NPR)",
            lambda q, marker: ParentStops(q.answer, marker, free_merge=True),
        ),
        Method("eager", "ours, eager", lambda q, _: OneRequest(q.answer, forks=True), is_ours=True),
        Method(
            ADAPTIVE,
            "ours, adaptive",
            lambda q, _: OneRequest(q.answer, forks=True),
            policy="adaptive",
            is_ours=True,
        ),
    )
}


def build_questions(
    answers: Sequence[ReplayAnswer], trace: Path, text: AnswerText, *, max_model_tokens: int
) -> list[Question]:
    """Return the answers that every method can give within so many tokens of context.

    Raises EvaluationError if none remains.
    """
    records = {line.id: extract_tree(line.response).tree for line in read_trace(trace)}
    questions = [
        Question(answer, skeleton_prompts(answer, records[answer.answer_id], text))
        for answer in answers
    ]
    fitting = [each for each in questions if _longest(each) < max_model_tokens]
    if not fitting:
        raise EvaluationError(
            f"none of {len(answers)} answers fits into {max_model_tokens} tokens with the prompts "
            "of every method"
        )
    return fitting


def marker_id(tokenizer: Any, taken_ids: Sequence[int]) -> int:
    """Return a token that no text has, and that no engine bans or ends a sequence with.

    That is a token which begins texts or pads them, and is none of `taken_ids`: those of forks and
    ends. Raises EvaluationError if the tokenizer has none.
    """
    for token_id in (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id):
        if token_id is not None and token_id not in taken_ids:
            return int(token_id)
    raise EvaluationError("the tokenizer has no special token beside those of forks and ends")


def _longest(question: Question) -> int:
    """Return a bound on the longest sequence of any method."""
    answer, prompts = question.answer, question.prompts
    num_markers = 3 * len(answer.tree.threads)
    skeleton = max(map(len, [prompts.skeleton, *prompts.points]))
    return max(len(answer.prompt_ids), skeleton) + len(answer.flat) + num_markers
