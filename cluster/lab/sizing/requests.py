"""Requests of a load: recorded answers, or random trees with given lengths."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from apar_core.errors import EvaluationError
from apar_core.tree import ROOT_THREAD, ParagraphTree, child_thread, restore
from apar_core.tree.threads import thread_scripts
from cluster.lab.sizing.errors import SizingError
from cluster.lab.virtual.text import TEXT_IDS, checkpoint_tokens, folded_ids, virtual_text
from cluster.loadtest.replay_answers import ReplayAnswer, replay_answers
from cluster.loadtest.trace import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable

# Gamma shape of the lengths of one answer's details: a coefficient of variation of 0.6.
_DETAIL_SHAPE = 2.8
# Weights of the root thread's introduction and conclusion, per fork; the paragraphs between forks
# weigh 1. Fewer than half of the answers have a conclusion.
_INTRODUCTION_SHARE = 0.3
_CONCLUSION_SHARE = 0.35
_CONCLUSION_CHANCE = 0.45
# Correlation between an answer's length and its number of forks.
_FORKS_WITH_LENGTH = 0.7
_LEVELS = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

Quantiles = tuple[float, ...]
"""Values at the levels 0, 5, 10, 25, 50, 75, 90, 95, 99 and 100 %; linear in between."""


@dataclass(frozen=True, slots=True)
class ForkProfile:
    """Distribution of lengths and forks, from recorded answers.

    forking: share of the answers that fork.
    prompts, answers: quantiles of the lengths in tokens; only their proportions are used.
    forks: quantiles of the number of forks, over answers that fork.
    root: quantiles of the root thread's share of the text, over answers that fork.
    """

    name: str
    source: str
    forking: float
    prompts: Quantiles
    answers: Quantiles
    forks: Quantiles = (0.0,) * len(_LEVELS)
    root: Quantiles = (1.0,) * len(_LEVELS)


# From shared/data/traces, in tokens of Llama's vocabulary.
_MIXED_PROMPTS = (43, 49, 52, 58, 72, 144, 343, 439, 698, 2878)
_MIXED_ANSWERS = (24, 58, 86, 169, 309, 451, 627, 788, 1021, 1346)
_PROFILES = (
    ForkProfile(
        "none", "505 answers in their natural mix, each written by one thread",
        0.0, _MIXED_PROMPTS, _MIXED_ANSWERS,
    ),
    ForkProfile(
        "mixed", "505 answers in their natural mix, a third of which fork",
        0.337, _MIXED_PROMPTS, _MIXED_ANSWERS,
        forks=(1, 1, 2, 3, 4, 6, 9, 10, 13, 15),
        root=(0.11, 0.21, 0.24, 0.30, 0.37, 0.53, 0.73, 0.79, 0.89, 0.94),
    ),
    ForkProfile(
        "structured", "474 lists and paragraphs, like the paper's APAR test set",
        0.985,
        (47, 51, 52, 60, 82, 210, 432, 517, 804, 1588),
        (114, 203, 223, 271, 338, 442, 589, 677, 823, 1089),
        forks=(2, 3, 3, 4, 5, 6, 9, 10, 14, 20),
        root=(0.10, 0.23, 0.26, 0.32, 0.39, 0.48, 0.60, 0.68, 0.78, 0.89),
    ),
)  # fmt: skip
PROFILES = {profile.name: profile for profile in _PROFILES}


@dataclass(frozen=True, slots=True)
class Workload:
    """Source of a load's requests.

    trace: file of recorded answers, with which the other fields are unused.
    forks: name of a fork profile.
    prompt_tokens, answer_tokens: mean lengths.
    """

    trace: Path | None = None
    forks: str = "mixed"
    prompt_tokens: float = 140.0
    answer_tokens: float = 300.0

    def describe(self) -> str:
        """Return where the requests come from, for reports."""
        if self.trace is not None:
            return f"recorded answers of {self.trace.name}"
        return (
            f"random trees of {self.prompt_tokens:g} + {self.answer_tokens:g} tokens on average; "
            f"forks and spread of lengths as in {PROFILES[self.forks].source}"
        )

    def requests(self, number: int, *, max_tokens: int, seed: int) -> list[ReplayAnswer]:
        """Return `number` requests; equal arguments give equal requests.

        A trace with fewer answers is repeated. Raises SizingError if requests of this workload do
        not fit into `max_tokens`, prompt included.
        """
        if self.trace is not None:
            return _recorded(self.trace, number, max_tokens)
        mean = self.prompt_tokens + self.answer_tokens
        if mean > max_tokens:
            raise SizingError(
                f"--prompt-tokens {self.prompt_tokens:g} and --answer-tokens "
                f"{self.answer_tokens:g} exceed the context of {max_tokens:,} tokens"
            )
        profile, random = PROFILES[self.forks], Random(seed)
        prompt_scale = self.prompt_tokens / _mean(profile.prompts)
        answer_scale = self.answer_tokens / _mean(profile.answers)
        made: list[ReplayAnswer] = []
        while len(made) < number:
            prompt = max(1, round(prompt_scale * _draw(profile.prompts, random)))
            level = random.random()
            answer = max(1, round(answer_scale * _quantile(profile.answers, level)))
            forks = 0
            if random.random() < profile.forking:
                is_alike = random.random() < _FORKS_WITH_LENGTH
                forks = round(_quantile(profile.forks, level if is_alike else random.random()))
            request = _random_request(str(len(made)), prompt, answer, forks, profile, random)
            # Each thread reads at most the prompt, the answer, and a few control tokens.
            if prompt + len(request.flat) + 2 <= max_tokens:
                made.append(request)
        return made


def _random_request(
    name: str,
    prompt_tokens: int,
    answer_tokens: int,
    forks: int,
    profile: ForkProfile,
    random: Random,
) -> ReplayAnswer:
    tree: ParagraphTree[int] = ParagraphTree()
    tokens = checkpoint_tokens()
    ids = _token_source(random)
    # Each fork needs a root paragraph and a detail of at least one token.
    num_forks = min(forks, (answer_tokens - 1) // 2)
    if num_forks == 0:
        tree.append(ROOT_THREAD, ids(answer_tokens))
        tree.finish(ROOT_THREAD)
    else:
        root_share = _draw(profile.root, random)
        root_tokens = round(root_share * answer_tokens)
        root_tokens = min(max(root_tokens, num_forks + 1), answer_tokens - num_forks)
        details = _split(
            answer_tokens - root_tokens,
            [random.gammavariate(_DETAIL_SHAPE, 1.0) for _ in range(num_forks)],
        )
        has_conclusion = random.random() < _CONCLUSION_CHANCE
        conclusion = _CONCLUSION_SHARE * num_forks if has_conclusion else 0.0
        weights = [_INTRODUCTION_SHARE * num_forks, *[1.0] * (num_forks - 1), conclusion]
        paragraphs = _split(root_tokens, weights)
        children = [child_thread(ROOT_THREAD, ordinal) for ordinal in range(num_forks)]
        for paragraph, child in zip(paragraphs, children, strict=False):
            tree.append(ROOT_THREAD, ids(max(paragraph, 1)))
            tree.fork(ROOT_THREAD, child)
        tree.append(ROOT_THREAD, ids(paragraphs[-1]))
        tree.finish(ROOT_THREAD)
        for child, detail in zip(children, details, strict=True):
            tree.append(child, ids(max(detail, 1)))
            tree.finish(child)
    return ReplayAnswer(
        answer_id=name,
        category="random",
        prompt="",
        messages=(),
        prompt_ids=tuple(ids(prompt_tokens)),
        threads=thread_scripts(tree, tokens.fork_id, tokens.end_id),
        flat=[*restore(tree), tokens.end_id],
        tree=tree,
    )


def _token_source(random: Random) -> Callable[[int], list[int]]:
    return lambda number: random.choices(TEXT_IDS, k=number)


def _split(total: int, weights: Sequence[float]) -> list[int]:
    """Split a total by weights into integers with the same sum."""
    whole, parts, before = sum(weights), [], 0
    reached = 0.0
    for weight in weights:
        reached += weight
        after = round(total * reached / whole)
        parts.append(after - before)
        before = after
    return parts


def _draw(quantiles: Quantiles, random: Random) -> float:
    return _quantile(quantiles, random.random())


def _quantile(quantiles: Quantiles, level: float) -> float:
    upper = min(bisect_right(_LEVELS, level), len(_LEVELS) - 1)
    low, high = _LEVELS[upper - 1], _LEVELS[upper]
    share = (level - low) / (high - low)
    return quantiles[upper - 1] + share * (quantiles[upper] - quantiles[upper - 1])


def _mean(quantiles: Quantiles) -> float:
    return sum(
        (high - low) * (quantiles[index] + quantiles[index + 1]) / 2
        for index, (low, high) in enumerate(pairwise(_LEVELS))
    )


def _recorded(trace: Path, number: int, max_tokens: int) -> list[ReplayAnswer]:
    text = virtual_text()
    try:
        answers, _ = replay_answers(
            read_trace(trace), text, text.tokens, max_tokens=max_tokens - 2, wanted=number
        )
    except EvaluationError as error:
        raise SizingError(f"--trace: {error}") from error
    # A repetition has other token ids, so that it misses the prefix cache.
    return [
        replace(
            answer, prompt_ids=tuple(folded_ids(answer.prompt_ids, offset=index // len(answers)))
        )
        for index, answer in enumerate(islice(cycle(answers), number))
    ]
