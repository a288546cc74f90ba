"""The methods to compare, and the questions that all of them answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from apar_core.errors import EvaluationError
from apar_core.formats.shipped_formats import LISTS
from apar_core.offline.data.structure import extract_tree
from cluster.lab.experiments.peers import (
    ClientForking,
    ParentStops,
    SkeletonOfThought,
    SkeletonPrompts,
    skeleton_prompts,
)
from cluster.lab.experiments.program import ParallelLists, Program, ReplayedRequest
from cluster.lab.virtual.list_answers import ListAnswer, list_answer
from cluster.loadtest.replay_answers import replay_answers
from cluster.loadtest.trace import read_trace

if TYPE_CHECKING:
    from apar_core.formats.control_tokens import TreeTokens
    from apar_core.formats.lists import ListRules
    from cluster.loadtest.replay_answers import AnswerText, ReplayAnswer

Policy = Literal["eager", "adaptive"]

SEQUENTIAL = "sequential"
EAGER = "eager"
ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class Question:
    """A recorded answer, its prompts for skeleton-of-thought, and its threads as a list.

    `in_lists` is None in an engine that does not write lists in parallel.
    """

    answer: ReplayAnswer
    prompts: SkeletonPrompts
    in_lists: ListAnswer | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """A method of answering questions.

    build: creates the program of a question; the number is the marker token of `peers.py`.
    policy: the engine's fork policy. parallel_format: its format; None: that of its checkpoint. An
        engine with another format exists in virtual time only.
    reserves: the engine keeps KV cache free for growing threads (`growth_reserve_tokens`).
    is_one_request: a question is one request, so that the engine can limit concurrent requests. For
        the other methods, the client limits them.
    """

    name: str
    title: str
    build: Callable[[Question, int], Program]
    policy: Policy = "eager"
    parallel_format: str | None = None
    reserves: bool = False
    is_ours: bool = False
    is_one_request: bool = False


def _replayed(name: str, title: str, *, forks: bool = True, **own: Any) -> Method:
    """Return a method of one request whose threads are those of the trace."""

    def build(question: Question, _: int) -> Program:
        return ReplayedRequest(question.answer, forks=forks)

    return Method(name, title, build, is_ours=forks, is_one_request=True, **own)


def _listed(name: str, title: str, **own: Any) -> Method:
    """Return a method of one request whose lists the engine writes in parallel."""

    def build(question: Question, _: int) -> Program:
        assert question.in_lists is not None
        return ParallelLists(question.answer, question.in_lists)

    return Method(
        name, title, build, parallel_format=LISTS.name, reserves=True, is_ours=True,
        is_one_request=True, **own,
    )  # fmt: skip


_METHODS = (
    _replayed(SEQUENTIAL, "sequential (vLLM)", forks=False),
    _replayed(EAGER, "ours, eager", reserves=True),
    _replayed(ADAPTIVE, "ours, adaptive", policy="adaptive", reserves=True),
    _replayed("sequential-reserve", "sequential, with our reserve", forks=False, reserves=True),
    _replayed("eager-unreserved", "ours, eager, without a reserve"),
    _listed("lists", "ours, lists without training"),
    _listed("lists-adaptive", "ours, lists without training, adaptive", policy="adaptive"),
    Method(
        "client-forking",
        "client-side forking (PaDoc, ThreadWeaver)",
        lambda question, marker: ClientForking(question.answer, marker),
    ),
    Method(
        "skeleton",
        "skeleton-of-thought",
        lambda question, marker: SkeletonOfThought(question.answer, marker, question.prompts),
    ),
    Method(
        "parent-stops",
        "parent stops, resubmitted",
        lambda question, marker: ParentStops(question.answer, marker),
    ),
    Method(
        "parent-stops-free",
        "parent stops, free merge (Multiverse, NPR)",
        lambda question, marker: ParentStops(question.answer, marker, free_merge=True),
    ),
)
METHODS = {method.name: method for method in _METHODS}


PEER_METHODS = tuple(name for name, each in METHODS.items() if each.parallel_format is None)
"""All methods whose threads are those of the trace, or which have none."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The questions of a run, in order. `marker_id` is a token that occurs in no text."""

    questions: Sequence[Question]
    marker_id: int

    @property
    def longest_tokens(self) -> int:
        """Upper bound on the tokens of any method's longest sequence."""
        return max(map(longest_sequence, self.questions))


def load_workload(
    path: Path,
    text: AnswerText,
    tokens: TreeTokens,
    marker: int,
    *,
    number: int,
    max_tokens: int,
    max_sequence_tokens: int,
    seed: int,
    list_rules: ListRules | None = None,
) -> Workload:
    """Return `number` questions of a trace: a sample, or repetitions if it has fewer.

    With `list_rules`, also the threads of their lists.

    Answers longer than `max_tokens`, prompt included, are left out. So are those for which another
    method may need a sequence longer than `max_sequence_tokens`. Raises EvaluationError for a trace
    that cannot be read or has no answer that fits.
    """
    lines = read_trace(path)
    answers, _ = replay_answers(lines, text, tokens, max_tokens=max_tokens)
    records = {line.id: extract_tree(line.response).tree for line in lines}
    questions = [
        Question(answer, skeleton_prompts(answer, records[answer.answer_id], text))
        for answer in answers
    ]
    questions = [each for each in questions if longest_sequence(each) <= max_sequence_tokens]
    if not questions:
        raise EvaluationError(
            f"none of {len(answers)} answers fits into {max_sequence_tokens} tokens with the "
            "prompts of every method"
        )
    if len(questions) > number:
        questions = random.Random(seed).sample(questions, number)
    if list_rules is not None:
        texts = {line.id: line.response for line in lines}

        def listed(answer: ReplayAnswer) -> ListAnswer:
            text, prompt_tokens = texts[answer.answer_id], len(answer.prompt_ids)
            return list_answer(text, list_rules, prompt_tokens, tokens.end_id)

        questions = [replace(each, in_lists=listed(each.answer)) for each in questions]
    return Workload(list(islice(cycle(questions), number)), marker)


def marker_id(tokenizer: Any, taken_ids: Sequence[int]) -> int:
    """Return a token that occurs in no text, and that no engine bans or ends a sequence with.

    It is the BOS, padding or unknown token, and not in `taken_ids`, the fork and end tokens. Raises
    EvaluationError if the tokenizer has none.
    """
    for token_id in (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id):
        if token_id is not None and token_id not in taken_ids:
            return int(token_id)
    raise EvaluationError("the tokenizer has no special token besides fork and end tokens")


def longest_sequence(question: Question) -> int:
    """Return an upper bound on the tokens of any method's longest sequence."""
    answer, prompts = question.answer, question.prompts
    num_markers = 3 * len(answer.tree.threads)
    skeleton = max(map(len, [prompts.skeleton, *prompts.points]))
    return max(len(answer.prompt_ids), skeleton) + len(answer.flat) + num_markers
