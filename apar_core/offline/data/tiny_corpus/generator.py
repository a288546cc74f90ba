"""Seeded samples of the corpus for training and for the held-out check."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from apar_core.offline.data.records import (
    ChatMessage,
    ExampleRecord,
    ParagraphRecord,
    flat_text,
)
from apar_core.offline.data.tiny_corpus.combinations import (
    Combination,
    all_combinations,
    split_combinations,
)

KindWeights = tuple[tuple[str, int], ...]

BROAD_WEIGHTS: KindWeights = (
    ("numbered", 26),
    ("bulleted", 15),
    ("paragraphs", 21),
    ("guide", 11),
    ("titles", 4),
    ("fact", 9),
    ("small_talk", 4),
    ("arithmetic", 6),
    ("code", 4),
)
# Short answers have few tokens and guides are rare: both are learned more slowly.
FINISHING_WEIGHTS: KindWeights = (
    ("numbered", 8),
    ("bulleted", 9),
    ("paragraphs", 12),
    ("guide", 18),
    ("titles", 9),
    ("fact", 15),
    ("small_talk", 4),
    ("arithmetic", 18),
    ("code", 7),
)
POLISHING_WEIGHTS: KindWeights = (
    ("numbered", 12),
    ("bulleted", 10),
    ("paragraphs", 12),
    ("guide", 5),
    ("titles", 10),
    ("fact", 17),
    ("small_talk", 2),
    ("arithmetic", 28),
    ("code", 4),
)
SETTLING_WEIGHTS: KindWeights = (
    ("numbered", 8),
    ("bulleted", 8),
    ("paragraphs", 34),
    ("guide", 5),
    ("titles", 9),
    ("fact", 26),
    ("small_talk", 1),
    ("arithmetic", 4),
    ("code", 5),
)
# For answers that join: each thread of a list has to find its point by a number.
JOINING_WEIGHTS: KindWeights = (
    ("numbered", 34),
    ("bulleted", 22),
    ("paragraphs", 16),
    ("guide", 5),
    ("titles", 3),
    ("fact", 9),
    ("small_talk", 2),
    ("arithmetic", 4),
    ("code", 5),
)

_SYSTEM_SHARE = 0.2
_HISTORY_SHARE = 0.15
_RAW_SHARE = 0.08
_CASUAL_SHARE = 0.15
_LONGEST_HISTORY_CHARACTERS = 700
_RAW_ANSWER_START = "\n\n"

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant who gives clear answers.",
    "Answer politely and to the point.",
    "You are apar-tiny, a small and helpful model.",
    "You are a patient teacher.",
    "Help the user as well as you can.",
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """One side of the split, ready for sampling.

    Different `stream` names give independent samples with the same seed.
    """

    seed: int
    held_out: bool = False
    kind_weights: KindWeights = BROAD_WEIGHTS
    stream: str = ""

    @property
    def _questions(self) -> Mapping[str, tuple[Combination, ...]]:
        return split_combinations(self.seed, held_out=self.held_out)

    def examples(self, number: int) -> Iterator[ExampleRecord]:
        """Yield `number` examples; they depend only on the fields of the corpus."""
        # Unlike hash(), seeding with text does not depend on the process.
        rng = random.Random(f"{self.seed}:{self.held_out}{self.stream}")
        weighted = [entry for entry in self.kind_weights if self._questions[entry[0]]]
        kinds, weights = zip(*weighted, strict=True)
        for _ in range(number):
            kind = rng.choices(kinds, weights)[0]
            yield _example(rng.choice(self._questions[kind]), rng, self.seed)


def _casual(question: str, rng: random.Random) -> str:
    """Return the question, sometimes as people type it in a hurry."""
    if rng.random() >= _CASUAL_SHARE:
        return question
    shortened = question[0].lower() + question[1:]
    return shortened.rstrip(".?!") if rng.random() < 0.7 else shortened


def _history(rng: random.Random, seed: int) -> tuple[ChatMessage, ChatMessage]:
    """Return an earlier turn; its answer is plain text, as clients send it."""
    known = split_combinations(seed, held_out=False)
    kinds, weights = zip(*BROAD_WEIGHTS, strict=True)
    while True:
        earlier = rng.choice(known[rng.choices(kinds, weights)[0]])
        text = flat_text(earlier.answer)
        if len(text) <= _LONGEST_HISTORY_CHARACTERS:
            return ChatMessage("user", earlier.question), ChatMessage("assistant", text)


def _example(combination: Combination, rng: random.Random, seed: int) -> ExampleRecord:
    question = ChatMessage("user", _casual(combination.question, rng))
    if rng.random() < _RAW_SHARE:
        return ExampleRecord(
            combination.kind, (question,), _raw_answer(combination.answer), raw_prompt=True
        )
    messages: tuple[ChatMessage, ...] = (question,)
    if rng.random() < _HISTORY_SHARE:
        messages = (*_history(rng, seed), *messages)
    if rng.random() < _SYSTEM_SHARE:
        messages = (ChatMessage("system", rng.choice(SYSTEM_PROMPTS)), *messages)
    return ExampleRecord(combination.kind, messages, combination.answer)


def _raw_answer(answer: ParagraphRecord) -> ParagraphRecord:
    """Return the answer to a bare question: after an empty line."""
    return ParagraphRecord(_RAW_ANSWER_START + answer.text, answer.first_child, answer.next_sibling)


def vocabulary_texts(seed: int) -> Iterator[str]:
    """Yield the training texts of the tokenizer: each answer once, and sampled questions."""
    seen: set[str] = set()
    for combination in all_combinations():
        text = flat_text(combination.answer)
        if text not in seen:
            seen.add(text)
            yield text
    yield from SYSTEM_PROMPTS
    for example in Corpus(seed).examples(4000):
        yield example.messages[-1].content
