"""Every question of the corpus with its answer, and the split into training and held-out ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.data.tiny_corpus.content import (
    NUM_POINTS,
    Point,
    Stage,
    Topic,
    arithmetic_replies,
    code_replies,
    fact_replies,
    load_topics,
    small_talk_replies,
)

SMALLEST_LIST = 3
FORKING_KINDS = ("numbered", "bulleted", "paragraphs", "guide")
PLAIN_KINDS = ("titles", "fact", "small_talk", "arithmetic", "code")
KINDS = FORKING_KINDS + PLAIN_KINDS

_NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
_DEFAULT_NUMBER = 4
_HELD_OUT_SHARE = 0.1

_NOUNS = {
    "tip": ("tips for", "good tips for", "useful tips for", "suggestions for", "rules for"),
    "fact": ("facts about", "interesting facts about", "short facts about", "things to know about"),
}
_NUMBERED_WORDINGS = (
    "Give me {n} {items}.",
    "List {n} {items}.",
    "What are {n} {items}?",
    "Write a numbered list of {n} {items}.",
    "I need {n} {items}.",
    "Can you give me {n} {items}?",
    "Tell me {n} {items}.",
    "I would like {n} {items}, please.",
)
_BULLETED_WORDINGS = (
    "Give me {n} {items} as bullet points.",
    "Write {n} bullet points with {items}.",
    "{items} in {n} bullets, please.",
    "Make a bulleted list of {n} {items}.",
)
_DEFAULT_BULLETED_WORDINGS = (
    "Give me some {items}.",
    "Do you have any {items}?",
    "List a few {items}.",
    "Share some {items}.",
)
_PARAGRAPH_WORDINGS = (
    "Write {n} about {topic}.",
    "Explain {topic} in {n}.",
    "Tell me about {topic} in {n}.",
    "I want to read {n} about {topic}.",
)
_DEFAULT_PARAGRAPH_WORDINGS = (
    "Tell me about {topic}.",
    "Write a short essay about {topic}.",
    "What should I know about {topic}?",
    "Explain {topic}.",
    "Write something about {topic}.",
)
_GUIDE_WORDINGS = {
    "tip": (
        "Give me a detailed guide to {topic}.",
        "Write a step-by-step guide to {topic}.",
        "Make a complete plan for {topic}.",
        "Give me a guide to {topic} with sections.",
    ),
    "fact": (
        "Give me a detailed overview of {topic}.",
        "Write a structured overview of {topic}.",
        "Give me an outline of {topic} with details.",
        "Give me an overview of {topic} with sections.",
    ),
}
_TITLES_WORDINGS = (
    "Name {n} {items}, titles only.",
    "Give me {n} {items}, just the titles.",
    "List {n} {items} without details.",
)
# Bulleted lists start in the middle, to differ from the numbered list on the same topic.
_FIRST_BULLET = 4


@dataclass(frozen=True, slots=True)
class Combination:
    """Question and answer: one topic in one form, wording and number."""

    kind: str
    question: str
    answer: ParagraphRecord


def items_phrase(topic: Topic, number: int) -> str:
    """Return a phrase such as "5 tips for baking bread"."""
    return f"{number} {'tips for' if topic.item == 'tip' else 'facts about'} {topic.name}"


def _detail(point: Point) -> ParagraphRecord:
    return ParagraphRecord(" " + point.detail)


def numbered_list(topic: Topic, number: int) -> ParagraphRecord:
    """Return an introduction, `number` numbered points that fork, and a closing line."""
    items = [
        (f"\n{index}. **{point.title}**:", _detail(point))
        for index, point in enumerate(topic.points[:number], start=1)
    ]
    first_text, first_detail = items[0]
    items[0] = (f"Here are {items_phrase(topic, number)}:\n{first_text}", first_detail)
    return chain(items, closing=f"\n\n{topic.closing}")


def bulleted_list(topic: Topic, number: int) -> ParagraphRecord:
    """Return `number` bulleted points that fork."""
    rotated = topic.points[_FIRST_BULLET:] + topic.points[:_FIRST_BULLET]
    items = [(f"\n- **{point.title}**:", _detail(point)) for point in rotated[:number]]
    items[0] = (items[0][0].lstrip("\n"), items[0][1])
    return chain(items)


def paragraphs(topic: Topic, number: int) -> ParagraphRecord:
    """Return `number` paragraphs that fork after their first sentence."""
    items = [
        (f"\n\n{passage.sentence}", ParagraphRecord(f" {passage.rest}"))
        for passage in topic.passages[:number]
    ]
    items[0] = (items[0][0].lstrip("\n"), items[0][1])
    return chain(items)


def _stage_detail(topic: Topic, stage: Stage) -> ParagraphRecord:
    points = [topic.points[number - 1] for number in stage.points]
    items = [(f"\n   - **{point.title}**:", _detail(point)) for point in points]
    items[0] = (f" {stage.lead}{items[0][0]}", items[0][1])
    return chain(items)


def guide(topic: Topic) -> ParagraphRecord:
    """Return numbered sections that fork, with points that fork again."""
    noun = "guide to" if topic.item == "tip" else "overview of"
    items = [
        (f"\n{index}. **{stage.title}**:", _stage_detail(topic, stage))
        for index, stage in enumerate(topic.stages, start=1)
    ]
    opening = f"Here is {'a' if topic.item == 'tip' else 'an'} {noun} {topic.name}:\n"
    items[0] = (opening + items[0][0], items[0][1])
    return chain(items)


def titles_only(topic: Topic, number: int) -> ParagraphRecord:
    """Return a numbered list of bare titles, too short to fork."""
    titles = [f"{index}. {point.title}" for index, point in enumerate(topic.points, start=1)]
    return ParagraphRecord("\n".join(titles[: min(number, NUM_POINTS)]))


def _spellings(number: int) -> tuple[str, str]:
    return str(number), _NUMBER_WORDS[number]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _lists(
    kind: str,
    topic: Topic,
    wordings: tuple[str, ...],
    answer: Callable[[Topic, int], ParagraphRecord],
) -> Iterator[Combination]:
    for number in range(SMALLEST_LIST, NUM_POINTS + 1):
        tree = answer(topic, number)
        for wording in wordings:
            for noun in _NOUNS[topic.item]:
                for spelling in _spellings(number):
                    question = wording.format(n=spelling, items=f"{noun} {topic.name}")
                    yield Combination(kind, _capital(question), tree)


def _default_bullets(topic: Topic) -> Iterator[Combination]:
    tree = bulleted_list(topic, _DEFAULT_NUMBER)
    for wording in _DEFAULT_BULLETED_WORDINGS:
        for noun in _NOUNS[topic.item]:
            question = wording.format(items=f"{noun} {topic.name}")
            yield Combination("bulleted", question, tree)


def _paragraphs(topic: Topic) -> Iterator[Combination]:
    for number in range(1, len(topic.passages) + 1):
        tree = paragraphs(topic, number)
        for spelling in _spellings(number):
            count = f"{spelling} paragraph{'s' if number > 1 else ''}"
            for wording in _PARAGRAPH_WORDINGS:
                yield Combination("paragraphs", wording.format(n=count, topic=topic.name), tree)
    tree = paragraphs(topic, len(topic.passages))
    for wording in _DEFAULT_PARAGRAPH_WORDINGS:
        yield Combination("paragraphs", wording.format(topic=topic.name), tree)


def _topic_combinations(topic: Topic) -> Iterator[Combination]:
    yield from _lists("numbered", topic, _NUMBERED_WORDINGS, numbered_list)
    yield from _lists("bulleted", topic, _BULLETED_WORDINGS, bulleted_list)
    yield from _default_bullets(topic)
    yield from _paragraphs(topic)
    tree = guide(topic)
    for wording in _GUIDE_WORDINGS[topic.item]:
        yield Combination("guide", wording.format(topic=topic.name), tree)
    yield from _lists("titles", topic, _TITLES_WORDINGS, titles_only)


def _plain_combinations() -> Iterator[Combination]:
    replies: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
        "fact": fact_replies,
        "small_talk": small_talk_replies,
        "arithmetic": arithmetic_replies,
        "code": code_replies,
    }
    for kind, pairs in replies.items():
        for question, answer in pairs():
            yield Combination(kind, question, ParagraphRecord(answer))


@cache
def all_combinations() -> tuple[Combination, ...]:
    """Return all combinations in a fixed order."""
    topics = [entry for topic in load_topics() for entry in _topic_combinations(topic)]
    return (*topics, *_plain_combinations())


def is_held_out(combination: Combination, seed: int) -> bool:
    """Return whether training with this seed must not see the combination.

    The choice depends only on question and seed, so it stays the same when the corpus grows. Small
    talk has too few wordings to hold any out.
    """
    if combination.kind == "small_talk":
        return False
    digest = hashlib.sha256(f"{seed}:{combination.question}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < _HELD_OUT_SHARE * 2**64


@cache
def split_combinations(seed: int, *, held_out: bool) -> dict[str, tuple[Combination, ...]]:
    """Return the combinations of one side of the split by kind."""
    chosen = [entry for entry in all_combinations() if is_held_out(entry, seed) == held_out]
    return {kind: tuple(entry for entry in chosen if entry.kind == kind) for kind in KINDS}
