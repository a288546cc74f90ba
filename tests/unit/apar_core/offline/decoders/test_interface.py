from __future__ import annotations

import math

import pytest

from apar_core.errors import RequestError
from apar_core.offline.decoders.interface import (
    DecodedAnswer,
    DecodedThread,
    DecodeLimits,
    TokenChoice,
    decode_answer,
    paragraph_tree,
)
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId
from tests.unit.apar_core.offline.decoders.small_decoders import CHILD, END, FORK, PROMPT, decoder


@pytest.mark.parametrize("temperature", [-0.1, math.inf, -math.inf, math.nan])
def test_an_invalid_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(RequestError, match=f"temperature .* got {temperature}") as caught:
        TokenChoice.sampled(temperature)

    assert caught.value.param == "temperature"
    with pytest.raises(RequestError):
        TokenChoice(temperature=temperature)


@pytest.mark.parametrize("top_p", [0.0, -0.5, 1.01, math.nan])
def test_an_invalid_top_p_is_refused(top_p: float) -> None:
    with pytest.raises(RequestError, match=f"top_p must be above 0 .* got {top_p}") as caught:
        TokenChoice.sampled(1.0, top_p)

    assert caught.value.param == "top_p"


def test_a_temperature_of_zero_is_greedy() -> None:
    limits = DecodeLimits(max_tokens=20)
    for name in ("plain", "vanilla_apar"):
        greedy, cold = (
            decode_answer(decoder(name), PROMPT, choice, limits).threads
            for choice in (TokenChoice.greedy(), TokenChoice.sampled(0.0, 0.5, seed=3))
        )

        assert cold == greedy


def test_the_default_choice_is_greedy_with_the_default_limits() -> None:
    replayed = TokenChoice.replay({"": [9, END]})

    assert TokenChoice() == TokenChoice.greedy()
    assert TokenChoice.greedy().tokens_of_thread is None
    assert replayed.temperature == 0
    assert DecodeLimits() == DecodeLimits(max_tokens=1024, max_threads=32, max_forks=512)


def test_sampling_never_gives_a_child_token_nor_two_fork_tokens_in_a_row() -> None:
    for name in ("vanilla_apar", "medusa_apar"):
        num_forks = 0
        for seed in range(8):
            choice = TokenChoice.sampled(3.0, seed=seed)
            answer = decode_answer(decoder(name), PROMPT, choice, DecodeLimits(max_tokens=60))

            for thread in answer.threads:
                before = None if thread.parent is None else CHILD
                for token in thread.token_ids:
                    assert token != CHILD
                    assert token != FORK or before not in (FORK, CHILD)
                    before = token
                    num_forks += token == FORK
        assert num_forks > 10


def test_nothing_runs_before_the_first_step_is_requested() -> None:
    stream = decoder("vanilla_apar").stream([])

    with pytest.raises(RequestError, match="prompt is empty"):
        next(stream)


def test_new_ids_of_all_steps_are_the_text() -> None:
    limits = DecodeLimits(max_tokens=80, max_forks=6)
    for name in ("plain", "vanilla_apar", "medusa_apar"):
        answer = decode_answer(decoder(name), PROMPT, limits=limits)
        stream = decoder(name).stream(PROMPT, limits=limits)

        assert [token for step in stream for token in step.new_ids] == answer.text_ids


FIRST, SECOND = ThreadId("root.0"), ThreadId("root.1")
THREADS = (
    DecodedThread(ROOT_THREAD, None, 0, (10, FORK, 11, FORK, 12), ended=True),
    DecodedThread(FIRST, ROOT_THREAD, 0, (20, 21), ended=True),
    DecodedThread(SECOND, ROOT_THREAD, 1, (30,), ended=False),
)


def test_the_text_of_a_child_follows_the_paragraph_that_forked() -> None:
    answer = DecodedAnswer(THREADS, (), 5, FORK)

    assert answer.text_ids == [10, 20, 21, 11, 30, 12]


def test_details_of_details_are_restored_in_reading_order() -> None:
    inner = ThreadId("root.0.0")
    threads = (
        DecodedThread(ROOT_THREAD, None, 0, (10, FORK, 11), ended=True),
        DecodedThread(FIRST, ROOT_THREAD, 0, (20, FORK, 21), ended=True),
        DecodedThread(inner, FIRST, 0, (40, 41), ended=True),
    )

    assert DecodedAnswer(threads, (), 5, FORK).text_ids == [10, 20, 40, 41, 21, 11]


def test_the_tree_is_finished_and_records_which_threads_ended() -> None:
    tree = paragraph_tree(THREADS, FORK)

    assert tree.finished
    assert {thread: record.ended for thread, record in tree.threads.items()} == {
        ROOT_THREAD: True,
        FIRST: True,
        SECOND: False,
    }


def test_a_model_without_control_tokens_has_no_forks() -> None:
    answer = DecodedAnswer(
        (DecodedThread(ROOT_THREAD, None, 0, (FORK, 9), ended=True),), (), 5, None
    )

    assert answer.text_ids == [FORK, 9]
    assert len(answer.tree.threads) == 1
