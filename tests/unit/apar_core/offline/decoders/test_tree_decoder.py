"""Rows, cache and limits of an answer during decoding."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.offline.decoders.interface import (
    DecodedAnswer,
    DecodedThread,
    DecodeLimits,
    TokenChoice,
    decode_answer,
)
from apar_core.offline.decoders.load import SINGLE_THREAD, DecoderName
from apar_core.tree.thread_names import replay_key
from tests.fakes.examples import num_examples
from tests.unit.apar_core.offline.decoders.small_decoders import (
    END,
    FORK,
    MAX_POSITIONS,
    PROMPT,
    chain_trees,
    decoder,
    prompt_decoder,
    watched_passes,
)

FORKING: tuple[DecoderName, ...] = ("vanilla_apar", "medusa_apar", "ppd_apar")
# Seven threads on three levels, of different lengths; the root thread ends before its children.
WIDE: Mapping[str, Sequence[int]] = {
    "": [9, FORK, 10, FORK, FORK, 11, END],
    "0": [12, 13, FORK, 14, 15, 16, 17, END],
    "0.0": [18, 19, 20, END],
    "1": [END],
    "2": [9, 9, 9, 9, FORK, FORK, 9, 9, END],
    "2.0": [10, 10],
    "2.1": [11, 11, 11, 11, 11, 11, END],
}
NUM_TEXT = sum(token not in (FORK, END) for tokens in WIDE.values() for token in tokens)


def threads_by_path(answer: DecodedAnswer) -> dict[str, DecodedThread]:
    return {thread.thread: thread for thread in answer.threads}


@pytest.mark.parametrize("name", FORKING)
@pytest.mark.parametrize("max_threads", [1, 2, 3, 32])
def test_a_pass_has_rows_only_for_live_threads_and_pending_forks(
    name: DecoderName, max_threads: int
) -> None:
    limits = DecodeLimits(max_threads=max_threads)
    with watched_passes() as passes:
        answer = decode_answer(decoder(name), PROMPT, TokenChoice.replay(WIDE), limits)

    alive = [step.threads for step in answer.trace]
    assert max(alive) <= max_threads
    assert len(passes.num_rows) == len(alive)
    # A thread that ends right after its fork token stays for the pass that computes it.
    extra = [rows - threads for rows, threads in zip(passes.num_rows, alive, strict=True)]
    assert max(extra) <= 0 if max_threads == 32 else max(extra) <= 1
    assert passes.num_rows[-1] < max(max(passes.num_rows), 2)


@pytest.mark.parametrize("name", ["plain", "ppd", *FORKING])
@pytest.mark.parametrize("num_passes", [1, 3, 6])
def test_a_stream_that_is_closed_early_frees_its_cache_at_once(
    name: DecoderName, num_passes: int
) -> None:
    replay = {"": [9] * 12} if name in SINGLE_THREAD else WIDE
    gc.disable()
    try:
        with watched_passes() as passes:
            stream = decoder(name).stream(PROMPT, TokenChoice.replay(replay))
            for _ in range(num_passes):
                next(stream, None)
            cache = passes.cache
            assert cache is not None
            stream.close()
        assert cache() is None
    finally:
        gc.enable()


def test_a_finished_answer_frees_its_cache_at_once() -> None:
    gc.disable()
    try:
        with watched_passes() as passes:
            decode_answer(decoder("medusa_apar"), PROMPT, TokenChoice.replay(WIDE))
        assert passes.cache is not None
        assert passes.cache() is None
    finally:
        gc.enable()


def test_a_decoder_can_be_used_after_an_abandoned_answer() -> None:
    for name in FORKING:
        expected = decode_answer(decoder(name), PROMPT, TokenChoice.replay(WIDE)).threads
        for num_passes in range(1, 8):
            stream = decoder(name).stream(PROMPT, TokenChoice.replay(WIDE))
            for _ in range(num_passes):
                next(stream, None)
            stream.close()

        assert decode_answer(decoder(name), PROMPT, TokenChoice.replay(WIDE)).threads == expected


def test_concurrent_answers_are_independent() -> None:
    limits = DecodeLimits(max_tokens=40, max_forks=6)
    for name in FORKING:
        alone = [decode_answer(decoder(name), [5, first], limits=limits) for first in (6, 7)]
        streams = [decoder(name).stream([5, first], limits=limits) for first in (6, 7)]
        found: list[list[int]] = [[], []]
        running = [0, 1]
        while running:
            for number in list(running):
                step = next(streams[number], None)
                if step is None:
                    running.remove(number)
                else:
                    found[number] += step.new_ids

        assert found == [answer.text_ids for answer in alone]


@pytest.mark.parametrize("name", FORKING)
@pytest.mark.parametrize("max_threads", [1, 2, 3])
@pytest.mark.parametrize("choice", [TokenChoice.greedy(), TokenChoice.sampled(0.9, 0.95, seed=4)])
def test_waiting_threads_get_the_same_tokens(
    name: DecoderName, max_threads: int, choice: TokenChoice
) -> None:
    decoding = decoder(name)
    if name == "ppd_apar" and choice.temperature > 0:
        # Typical acceptance depends on the tree, and the tree on the number of live rows.
        trees = chain_trees(3)
        decoding = prompt_decoder(name, trees=lambda _num_rows: trees)
    compared: set[str] = set()
    for prompt in ([5, 6], [7], [8, 9, 10]):
        limits = {"max_tokens": 300, "max_forks": 40}
        free = decode_answer(decoding, prompt, choice, DecodeLimits(**limits, max_threads=512))
        waited = decode_answer(
            decoding, prompt, choice, DecodeLimits(**limits, max_threads=max_threads)
        )

        found, expected = threads_by_path(waited), threads_by_path(free)
        for path in found.keys() & expected.keys():
            size = min(len(found[path].token_ids), len(expected[path].token_ids))
            assert found[path].token_ids[:size] == expected[path].token_ids[:size]
            compared.add(path)
    assert len(compared) > 1


@pytest.mark.parametrize("name", FORKING)
@pytest.mark.parametrize("max_tokens", range(1, NUM_TEXT + 2))
def test_max_tokens_is_reached_exactly(name: DecoderName, max_tokens: int) -> None:
    for top_k in ((2, 2), (12, 12)):
        decoding = decoder(name, top_k) if name == "medusa_apar" else decoder(name)
        answer = decode_answer(
            decoding, PROMPT, TokenChoice.replay(WIDE), DecodeLimits(max_tokens=max_tokens)
        )

        assert len(answer.text_ids) == min(max_tokens, NUM_TEXT)
        for thread in answer.threads:
            path = replay_key(thread.thread)
            assert list(thread.token_ids) == list(WIDE[path])[: len(thread.token_ids)]
        assert answer.tree.finished


@settings(max_examples=num_examples(30), deadline=None)
@given(st.integers(1, 60), st.integers(1, 4), st.sampled_from([(1,), (4, 4), (20, 3)]))
def test_with_max_tokens_medusa_threads_are_prefixes_of_vanilla_threads(
    max_tokens: int, max_threads: int, top_k: tuple[int, ...]
) -> None:
    limits = DecodeLimits(max_tokens=max_tokens, max_threads=max_threads, max_forks=8)
    whole = DecodeLimits(max_tokens=400, max_threads=64, max_forks=64)

    medusa = decode_answer(decoder("medusa_apar", top_k), [5, 6, 7], limits=limits)
    vanilla = decode_answer(decoder("vanilla_apar"), [5, 6, 7], limits=whole)

    assert len(medusa.text_ids) <= max_tokens
    longest = threads_by_path(vanilla)
    for thread in medusa.threads:
        expected = longest[thread.thread].token_ids if thread.thread in longest else ()
        size = min(len(expected), len(thread.token_ids))
        assert thread.token_ids[:size] == expected[:size]


@pytest.mark.parametrize("name", FORKING)
def test_a_thread_ends_at_the_end_of_the_context(name: DecoderName) -> None:
    prompt = [5] * (MAX_POSITIONS - 6)
    replay = {"": [9, FORK, *[10] * 20], "0": [11] * 20}

    answer = decode_answer(decoder(name), prompt, TokenChoice.replay(replay))

    root, child = answer.threads
    assert len(prompt) + len(root.token_ids) == MAX_POSITIONS
    assert len(prompt) + 3 + len(child.token_ids) == MAX_POSITIONS
    assert not root.ended
    assert not child.ended


@pytest.mark.parametrize("name", FORKING)
def test_forks_beyond_their_limit_open_no_thread(name: DecoderName) -> None:
    answer = decode_answer(
        decoder(name), PROMPT, TokenChoice.replay(WIDE), DecodeLimits(max_forks=2)
    )

    written = [thread.thread for thread in answer.threads if thread.token_ids or thread.ended]
    assert len(written) == 3


@pytest.mark.parametrize("name", FORKING)
def test_a_fork_as_the_last_token_of_a_thread_still_opens_its_child(name: DecoderName) -> None:
    replay = {"": [9, FORK], "0": [10, FORK], "0.0": [11, 12, END]}

    for max_threads in (1, 2, 8):
        answer = decode_answer(
            decoder(name), PROMPT, TokenChoice.replay(replay), DecodeLimits(max_threads=max_threads)
        )

        assert [thread.token_ids for thread in answer.threads] == [(9, FORK), (10, FORK), (11, 12)]
