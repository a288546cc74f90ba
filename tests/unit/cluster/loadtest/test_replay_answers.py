"""Recorded answers as tokens: the same text, forked and flat."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.errors import EvaluationError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ParagraphRecord, chain, count_forks, token_tree
from apar_core.offline.data.structure import extract_tree
from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, ModelText, load_text
from apar_core.tree import restore, tree_statistics
from cluster.loadtest.replay_answers import (
    ReplayAnswer,
    longest_sequence,
    replay_answer,
    replay_answers,
)
from cluster.loadtest.trace import TraceLine, read_trace
from tests.fakes.examples import num_examples

DATA = Path(__file__).resolve().parents[5] / "shared" / "data" / "traces"
LLAMA = load_text(LLAMA_TOKENIZER)
TINY = load_text(str(checkpoint_path()))
LIST = "Tips:\n\n1. Rest: Sleep well, and long.\n2. Eat: Greens and fruit.\n3. Play: With a ball."
WORDS = st.text(st.sampled_from("abc déf.:!\n🙂1"), min_size=1, max_size=40)
# Fewer than three points, or shorter ones, do not fork.
ITEMS = st.lists(st.tuples(WORDS, WORDS.map("Ten chars. ".__add__)), min_size=3, max_size=6)


def line(response: str, prompt: str = "Why?") -> TraceLine:
    return TraceLine("a", "stem", prompt, response)


def read_out(threads: Mapping[str, list[int]], text: ModelText, path: str = "") -> list[int]:
    """Return the text of a thread with its children at their forks."""
    ids: list[int] = []
    forks = 0
    assert threads[path][-1] == text.tokens.end_id
    for token_id in threads[path][:-1]:
        if token_id == text.tokens.fork_id:
            ids += read_out(threads, text, f"{path}.{forks}" if path else str(forks))
            forks += 1
        else:
            ids.append(token_id)
    return ids


def check(answer: ReplayAnswer, text: ModelText, response: str) -> None:
    assert answer.flat[-1] == text.tokens.end_id
    assert answer.flat[:-1] == restore(answer.tree) == read_out(answer.threads, text)
    assert text.decode(answer.flat) == response
    assert answer.text_tokens == len(answer.flat) - 1
    assert answer.num_threads == tree_statistics(answer.tree, 0).threads == len(answer.threads)
    generated = sum(len(ids) for ids in answer.threads.values())
    assert generated == answer.text_tokens + 2 * answer.num_threads - 1


@pytest.mark.parametrize("text", [LLAMA, TINY], ids=["llama", "apar-tiny"])
@settings(max_examples=num_examples(60), deadline=None)
@given(items=ITEMS, closing=WORDS)
def test_an_answer_has_the_same_text_forked_and_flat(
    text: ModelText, items: list[tuple[str, str]], closing: str
) -> None:
    listed = "".join(f"{n}. {root}: {detail}\n" for n, (root, detail) in enumerate(items, 1))
    for response in (listed + closing, "\n\n".join(root for root, _ in items), closing):
        check(replay_answer(line(response), text, text.tokens), text, response)


@settings(max_examples=num_examples(30), deadline=None)
@given(st.lists(st.tuples(st.just("Root"), WORDS.map("Ten chars. ".__add__)), min_size=3))
def test_points_with_details_fork(items: list[tuple[str, str]]) -> None:
    listed = "".join(
        f"{n}. {root}: {detail.replace(':', '').split(chr(10))[0]}\n"
        for n, (root, detail) in enumerate(items, 1)
    )

    answer = replay_answer(line(listed), TINY, TINY.tokens)

    assert answer.num_threads == 1 + len(items)


def test_a_list_has_a_thread_for_each_point() -> None:
    fork, end = TINY.tokens.fork_id, TINY.tokens.end_id
    encode = TINY.encode

    answer = replay_answer(line(LIST), TINY, TINY.tokens)

    roots = [encode("Tips:\n\n1. Rest:"), encode("\n2. Eat:"), encode("\n3. Play:")]
    assert answer.threads == {
        "": [*roots[0], fork, *roots[1], fork, *roots[2], fork, end],
        "0": [*encode(" Sleep well, and long."), end],
        "1": [*encode(" Greens and fruit."), end],
        "2": [*encode(" With a ball."), end],
    }
    assert answer.prompt_ids == tuple(TINY.encode_chat(answer.messages))
    assert answer.scripts(forked=False) == {"": answer.flat}
    assert answer.apar_field(forked=True) == {"enabled": True, "replay": answer.threads}
    assert answer.max_tokens == answer.text_tokens + 1


def test_only_answers_that_fit_are_replayed() -> None:
    short, long = line("Because."), line("Because. " * 100)
    answer = replay_answer(short, TINY, TINY.tokens)
    fits = len(answer.prompt_ids) + len(answer.flat)

    assert longest_sequence(answer, TINY.tokens) == fits
    kept, left_out = replay_answers([short, long], TINY, TINY.tokens, max_tokens=fits)
    assert [each.flat for each in kept] == [answer.flat]
    assert left_out == 1
    assert len(replay_answers([short, long], TINY, TINY.tokens)[0]) == 2
    with pytest.raises(EvaluationError, match=f"none of 2 answers fits into {fits - 1} tokens"):
        replay_answers([short, long], TINY, TINY.tokens, max_tokens=fits - 1)


def test_a_forked_sequence_may_be_longer_than_the_flat_one() -> None:
    tree = token_tree(chain([("a", chain([("b", ParagraphRecord("c"))]))]), lambda text: [9])
    flat = [*restore(tree), TINY.tokens.end_id]
    answer = ReplayAnswer("a", "", "", (), (8, 8), {}, flat, tree)

    # Prompt, two paragraphs each with fork and child token, one token of text, end token.
    assert longest_sequence(answer, TINY.tokens) == 2 + 3 + 3 + 1 + 1
    assert len(answer.prompt_ids) + len(flat) == 2 + 4


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data does not lie beside the repository")
def test_real_answers_have_a_thread_for_each_fork() -> None:
    lines = read_trace(DATA / "structured.jsonl", limit=60)

    answers, _ = replay_answers(lines, LLAMA, LLAMA.tokens)

    for given_line, answer in zip(lines, answers, strict=True):
        check(answer, LLAMA, given_line.response)
        assert answer.num_threads == 1 + count_forks(extract_tree(given_line.response).tree)
    assert sum(answer.num_threads for answer in answers) > 5 * len(answers)
