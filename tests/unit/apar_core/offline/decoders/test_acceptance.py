"""Typical acceptance in whole answers: both extremes and low temperature."""

from __future__ import annotations

import pytest

from apar_core.offline.decoders.interface import DecodeLimits, TokenChoice, decode_answer
from apar_core.offline.decoders.load import ThreadDecoder, build_decoder
from apar_core.offline.decoders.proposer import MedusaProposer
from apar_core.offline.decoders.token_chooser import TypicalAcceptance
from tests.unit.apar_core.offline.decoders.small_decoders import CONTROL, END, decoder, small_model

LIMITS = DecodeLimits(max_tokens=60, max_forks=6)
PROMPTS = ([5, 6, 7], [9], [10, 11], [20, 21, 22, 23])
# No probability is above 1, and all nonzero ones are above 0.
NONE, ALL = TypicalAcceptance(epsilon=1.0, delta=1e9), TypicalAcceptance(epsilon=0.0, delta=0.0)


def medusa(acceptance: TypicalAcceptance, top_k: tuple[int, ...] = (2, 2)) -> ThreadDecoder:
    proposer = decoder("medusa_apar").decoding.proposer
    assert isinstance(proposer, MedusaProposer)
    return build_decoder(
        "medusa_apar",
        small_model(),
        CONTROL,
        frozenset({END}),
        heads=proposer.heads,
        top_k=top_k,
        acceptance=acceptance,
    )


@pytest.mark.parametrize("prompt", PROMPTS)
def test_without_acceptance_medusa_samples_like_vanilla_with_the_same_seed(
    prompt: list[int],
) -> None:
    num_faster = 0
    for seed in range(5):
        choice = TokenChoice.sampled(1.0, 0.9, seed)

        vanilla = decode_answer(decoder("vanilla_apar"), prompt, choice, LIMITS)
        found = decode_answer(medusa(NONE, (12, 12)), prompt, choice, LIMITS)

        # Drawn candidates are accepted, so max_tokens may be reached in another order.
        expected = {thread.thread: thread.token_ids for thread in vanilla.threads}
        for thread in found.threads:
            shared = list(zip(thread.token_ids, expected.get(thread.thread, ()), strict=False))
            assert all(ours == theirs for ours, theirs in shared)
        if len(vanilla.trace) > 1:
            assert len(found.trace) < len(vanilla.trace)
            num_faster += 1
    assert num_faster >= 4


@pytest.mark.parametrize("prompt", PROMPTS)
def test_with_full_acceptance_a_thread_gains_a_token_per_head_and_one_more(
    prompt: list[int],
) -> None:
    choice = TokenChoice.sampled(1.0, seed=5)

    for top_k in ((1,), (2, 2)):
        answer = decode_answer(medusa(ALL, top_k), prompt, choice, LIMITS)

        first, second, *_ = answer.trace
        assert first.tokens == 1
        ended = answer.threads[0].ended and len(answer.threads[0].token_ids) <= len(top_k) + 1
        assert second.tokens == len(top_k) + 1 or ended
        assert len(answer.text_ids) <= LIMITS.max_tokens


@pytest.mark.parametrize("prompt", PROMPTS)
def test_at_a_temperature_near_zero_typical_acceptance_is_greedy(prompt: list[int]) -> None:
    cold = TokenChoice.sampled(1e-4, seed=5)

    found = decode_answer(medusa(TypicalAcceptance()), prompt, cold, LIMITS)

    greedy = decode_answer(medusa(TypicalAcceptance()), prompt, TokenChoice.greedy(), LIMITS)
    assert found.threads == greedy.threads
    assert len(found.trace) == len(greedy.trace)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_no_candidate_outside_top_p_is_accepted(prompt: list[int]) -> None:
    # Such a small top_p leaves only the likeliest token: the answer is greedy.
    narrow = TokenChoice.sampled(1.0, 1e-6, seed=5)

    found = decode_answer(medusa(ALL, (12, 12)), prompt, narrow, LIMITS)

    greedy = decode_answer(decoder("vanilla_apar"), prompt, TokenChoice.greedy(), LIMITS)
    expected = {thread.thread: thread.token_ids for thread in greedy.threads}
    assert len(found.threads[0].token_ids) > 2
    for thread in found.threads:
        shared = list(zip(thread.token_ids, expected.get(thread.thread, ()), strict=False))
        assert all(ours == theirs for ours, theirs in shared)
