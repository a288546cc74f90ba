"""Corpus of the embedded model."""

from __future__ import annotations

import re

import pytest

from apar_core.offline.data.records import (
    ExampleRecord,
    ParagraphRecord,
    count_forks,
    flat_text,
    thread_paragraphs,
)
from apar_core.offline.data.tiny_corpus import combinations
from apar_core.offline.data.tiny_corpus.combinations import (
    FORKING_KINDS,
    KINDS,
    PLAIN_KINDS,
    all_combinations,
    is_held_out,
    split_combinations,
)
from apar_core.offline.data.tiny_corpus.content import NUM_POINTS, Topic, load_topics
from apar_core.offline.data.tiny_corpus.generator import Corpus

CONTROL_SPELLINGS = ("[Fork]", "[Child]", "<eos>", "<bos>", "<|")


def topic(name: str) -> Topic:
    return next(entry for entry in load_topics() if entry.name == name)


def test_there_are_dozens_of_distinct_topics() -> None:
    names = [entry.name for entry in load_topics()]

    assert len(names) >= 60
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("entry", load_topics(), ids=lambda entry: entry.name)
def test_content_consists_of_sentences(entry: Topic) -> None:
    sentences = [point.detail for point in entry.points] + [entry.closing]
    sentences += [text for passage in entry.passages for text in (passage.sentence, passage.rest)]
    sentences += [stage.lead for stage in entry.stages]

    for text in sentences:
        assert re.fullmatch(r"[A-Z0-9].*[.!?]", text), text
        assert "  " not in text
    titles = [point.title for point in entry.points]
    assert len(set(titles)) == NUM_POINTS
    assert all(title[0].isupper() and title[-1] not in ".:" for title in titles)


def test_a_numbered_list_restores_to_the_flat_answer() -> None:
    text = flat_text(combinations.numbered_list(topic("learning guitar"), 3))

    assert text == (
        "Here are 3 tips for learning guitar:\n\n"
        "1. **Practice daily**: Set aside fifteen minutes at the same time each day. Short, "
        "regular sessions train your fingers better than one long evening a week. Keep the guitar "
        "in sight, and you will pick it up more often.\n"
        "2. **Tune first**: Check every string with a tuner before you play. A guitar that is in "
        "tune makes even simple chords sound good and trains your ear. New strings stretch a "
        "little, so check them again after the first song.\n"
        "3. **Start with open chords**: Learn the chords of G, C, D and E minor first. These four "
        "shapes are enough to play hundreds of well-known songs. Play each string alone at first, "
        "and move any finger that blocks a sound.\n\n"
        "Be patient, and enjoy every small step on the way."
    )


def test_a_guide_forks_inside_the_details_of_its_sections() -> None:
    guide = combinations.guide(topic("learning guitar"))

    sections = [p.first_child for p in thread_paragraphs(guide) if p.first_child]
    assert [count_forks(section) for section in sections] == [3, 3, 2]
    assert (
        "1. **First steps**: Build the basics slowly and calmly.\n   - **Practice daily**: Set"
        in (flat_text(guide))
    )


def test_answers_fork_if_and_only_if_their_kind_does() -> None:
    for combination in all_combinations():
        assert (count_forks(combination.answer) > 0) == (combination.kind in FORKING_KINDS)
    assert {entry.kind for entry in all_combinations()} == set(KINDS)


def _asked_number(question: str) -> int | None:
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
    found = re.search(r"\b([3-8]|three|four|five|six|seven|eight)\b", question.lower())
    if found is None:
        return None
    return words.index(found[1]) if found[1] in words else int(found[1])


@pytest.mark.parametrize("kind", ["numbered", "bulleted"])
def test_lists_have_as_many_points_as_the_question_asks_for(kind: str) -> None:
    entries = [entry for entry in all_combinations() if entry.kind == kind]
    asked = [(entry, _asked_number(entry.question)) for entry in entries]

    assert sum(number is not None for _, number in asked) > 1000
    for entry, number in asked:
        if number is not None:
            assert count_forks(entry.answer) == number, entry.question


def test_no_question_has_two_answers() -> None:
    answers_by_question: dict[str, ParagraphRecord] = {}
    for entry in all_combinations():
        assert answers_by_question.setdefault(entry.question, entry.answer) == entry.answer


def test_the_split_is_disjoint_and_complete() -> None:
    trained = {e.question for es in split_combinations(0, held_out=False).values() for e in es}
    held_out = {e.question for es in split_combinations(0, held_out=True).values() for e in es}

    assert not trained & held_out
    assert trained | held_out == {entry.question for entry in all_combinations()}
    assert 0.08 < len(held_out) / (len(trained) + len(held_out)) < 0.12
    for kind in (*FORKING_KINDS, *PLAIN_KINDS):
        assert bool(split_combinations(0, held_out=True)[kind]) == (kind != "small_talk")


def test_another_seed_holds_out_other_combinations() -> None:
    chosen = [
        {entry.question for entry in all_combinations() if is_held_out(entry, seed)}
        for seed in (0, 1)
    ]

    assert len(chosen[0] & chosen[1]) < 0.3 * len(chosen[0])


def test_held_out_examples_end_with_held_out_questions_only() -> None:
    trained = {
        entry.question.lower().rstrip(".?!")
        for entries in split_combinations(0, held_out=False).values()
        for entry in entries
    }

    for example in Corpus(0, held_out=True).examples(300):
        assert example.messages[-1].content.lower().rstrip(".?!") not in trained


def test_the_corpus_depends_on_the_seed() -> None:
    first = list(Corpus(3).examples(200))

    assert first == list(Corpus(3).examples(200))
    assert first != list(Corpus(4).examples(200))


@pytest.fixture(scope="module")
def examples() -> list[ExampleRecord]:
    return list(Corpus(0).examples(2000))


def test_prompts_and_texts_contain_no_control_tokens(
    examples: list[ExampleRecord],
) -> None:
    for example in examples:
        texts = [message.content for message in example.messages] + [flat_text(example.answer)]
        assert not any(spelling in text for text in texts for spelling in CONTROL_SPELLINGS)


def test_the_history_of_a_chat_contains_restored_answers(examples: list[ExampleRecord]) -> None:
    known = {entry.question: flat_text(entry.answer) for entry in all_combinations()}
    histories = 0
    for example in examples:
        turns = [message for message in example.messages if message.role != "system"]
        if len(turns) == 3:
            histories += 1
            assert turns[1].content == known[turns[0].content]

    assert histories > 100


def test_all_forms_of_prompts_occur(examples: list[ExampleRecord]) -> None:
    assert {example.kind for example in examples} == set(KINDS)
    assert sum(example.raw_prompt for example in examples) > 50
    assert sum(example.messages[0].role == "system" for example in examples) > 200
    assert all(example.messages[-1].role == "user" for example in examples)
