"""Prompt lookup and Token Recycling: they guess without weights, and change no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.decoders.interface import DecodeLimits, TokenChoice, decode_answer
from apar_core.offline.decoders.load import (
    UNFORKED,
    DecoderName,
    build_decoder,
    load_decoder,
    load_tokenizer,
)
from apar_core.offline.decoders.token_chooser import EXACT
from apar_core.offline.decoders.weightless import LookupProposer, RecyclingProposer
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.sparse_tree import static_tree
from apar_core.offline.training.chat_format import chat_token_ids
from tests.fakes.examples import num_examples
from tests.unit.apar_core.offline.decoders.small_decoders import (
    CHILD,
    CONTROL,
    END,
    FORK,
    PROMPT,
    VOCABULARY,
    decoder,
    small_model,
)

PAIRS: tuple[tuple[DecoderName, DecoderName], ...] = (
    ("lookup", "plain"),
    ("lookup_apar", "vanilla_apar"),
    ("recycling", "plain"),
    ("recycling_apar", "vanilla_apar"),
)


@pytest.mark.ci
@settings(max_examples=num_examples(25), deadline=None)
@given(
    st.lists(st.integers(5, VOCABULARY - 1), min_size=1, max_size=12),
    st.sampled_from([(1,), (2, 2), (1, 1, 1, 1), (3, 3, 3)]),
)
def test_guesses_change_no_greedy_token(prompt: list[int], top_k: tuple[int, ...]) -> None:
    limits = DecodeLimits(max_tokens=60, max_forks=6)
    for name, reference in PAIRS:
        found = decode_answer(decoder(name, top_k), prompt, limits=limits)
        expected = decode_answer(decoder(reference), prompt, limits=limits)

        longest = {thread.thread: thread.token_ids for thread in expected.threads}
        for thread in found.threads:
            other = longest.get(thread.thread, ())
            size = min(len(thread.token_ids), len(other))
            assert thread.token_ids[:size] == other[:size]


@pytest.mark.parametrize(("name", "reference"), PAIRS)
def test_replayed_threads_with_forks_are_the_same_in_fewer_passes(
    name: DecoderName, reference: DecoderName
) -> None:
    forks = [] if name not in UNFORKED else [FORK]
    detail = [9, 10, 11, 12] * 5
    replay = {"": [*detail, *forks, *detail, *forks, 13, END]}
    if forks:
        replay |= {"0": [*detail, END], "1": [*detail, END]}

    found = decode_answer(decoder(name, (1, 1, 1)), PROMPT, TokenChoice.replay(replay))

    expected = decode_answer(decoder(reference), PROMPT, TokenChoice.replay(replay))
    assert found.threads == expected.threads
    if name.startswith("lookup"):
        assert len(found.trace) < 0.6 * len(expected.trace)


@pytest.mark.parametrize(("name", "reference"), PAIRS)
def test_with_exact_acceptance_samples_are_those_of_plain_decoding(
    name: DecoderName, reference: DecoderName
) -> None:
    table = AcceptanceTable(probabilities=((0.3,) * (3 if "recycling" in name else 1),) * 3)
    states = static_tree(table, 6).trees
    exact = build_decoder(
        name, small_model(), CONTROL, frozenset({END}), trees=lambda _rows: states, acceptance=EXACT
    )
    limits = DecodeLimits(max_tokens=60, max_forks=6)
    for seed in range(4):
        choice = TokenChoice.sampled(1.0, 0.9, seed)

        found = decode_answer(exact, PROMPT, choice, limits)

        expected = decode_answer(decoder(reference), PROMPT, choice, limits)
        longest = {thread.thread: thread.token_ids for thread in expected.threads}
        for thread in found.threads:
            other = longest.get(thread.thread, ())
            size = min(len(thread.token_ids), len(other))
            assert thread.token_ids[:size] == other[:size]


def test_the_longest_match_at_its_last_place_is_continued() -> None:
    proposer = LookupProposer(3)

    states = proposer.states([[1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], [4, 5], [6, 6, 6]], [])

    # 1 2 3 stood once, 2 3 later too; 4 5 did not; 6 6 overlaps itself.
    assert proposer._found == [[7, 9, 2], [], [6]]
    assert states == [3, 0, 1]


def test_other_threads_of_the_answer_are_searched_last() -> None:
    proposer = LookupProposer(2)

    proposer.states([[5, 1, 2], [9, 1, 2, 4, 1, 2]], [[1, 2, 3], [1, 2, 6, 7]])

    assert proposer._found == [[6, 7], [4, 1]]


def test_the_path_of_each_thread_is_searched_also_of_grandchildren_and_waiting_ones() -> None:
    replay = {
        "": [9, FORK, 10, FORK, 11, 11, END],
        "0": [12, FORK, 13, 13, END],
        "0.0": [14, 15, 16, END],
        "1": [17, 18, END],
    }
    whole = {
        "": [*PROMPT, 9, FORK, 10, FORK, 11, 11],
        "0": [*PROMPT, 9, FORK, CHILD, 12, FORK, 13, 13],
        "0.0": [*PROMPT, 9, FORK, CHILD, 12, FORK, CHILD, 14, 15, 16],
        "1": [*PROMPT, 9, FORK, 10, FORK, CHILD, 17, 18],
    }
    searched: list[list[int]] = []

    class Watched(LookupProposer):
        def states(self, paths: Sequence[list[int]], others: Sequence[list[int]]) -> list[int]:
            searched.extend(paths)
            return super().states(paths, others)

    watched = decoder("lookup_apar", (1, 1))
    old = watched.decoding
    decoding = replace(old, proposer=Watched(8))
    for max_threads in (1, 2, 8):
        searched.clear()

        decode_answer(
            replace(watched, decoding=decoding), PROMPT, TokenChoice.replay(replay),
            DecodeLimits(max_threads=max_threads),
        )  # fmt: skip

        for path in searched:
            assert any(text[: len(path)] == path for text in whole.values()), path
        assert {tuple(path[: len(PROMPT) + 6]) for path in searched} >= {
            tuple(text[: len(PROMPT) + 6]) for key, text in whole.items() if key in ("", "0.0")
        }


def test_recycled_candidates_are_those_of_the_parent_s_token() -> None:
    proposer = RecyclingProposer(6, 2, torch.device("cpu"))
    logits_RCV = torch.tensor([[[0.0, 1, 2, 3, 4, 5], [5.0, 4, 3, 2, 1, 0]]])

    proposer.learn(torch.tensor([[2, 3]]), logits_RCV)

    assert proposer.after_VK.tolist() == [[0, 0], [0, 0], [5, 4], [0, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize(("name", "reference"), PAIRS)
def test_they_decode_the_embedded_model_without_further_files(
    name: DecoderName, reference: DecoderName
) -> None:
    tokenizer = load_tokenizer(checkpoint_path())
    prompt = chat_token_ids([ChatMessage("user", "Give me 5 tips for learning guitar.")], tokenizer)
    limits = DecodeLimits(max_tokens=80)

    found, expected = (
        decode_answer(load_decoder(each, checkpoint_path(), device="cpu"), prompt, limits=limits)
        for each in (name, reference)
    )

    assert found.text_ids[:20] == expected.text_ids[:20]
