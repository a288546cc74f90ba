"""All decoders on a small random model, with random trees, prompts and candidates."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.offline.decoders.interface import DecodeLimits, TokenChoice, decode_answer
from apar_core.offline.decoders.load import DECODER_NAMES
from apar_core.tree.statistics import tree_statistics
from apar_core.tree.thread_names import replay_key
from tests.fakes.examples import num_examples
from tests.unit.apar_core.offline.decoders.small_decoders import (
    CHILD,
    END,
    FORK,
    PROMPT,
    VOCABULARY,
    decoder,
)


@st.composite
def replays(draw: st.DrawFn) -> dict[str, list[int]]:
    """Draw the tokens of each thread of a tree; some are cut off or fork twice in a row."""
    threads: dict[str, list[int]] = {}
    pending = [""]
    while pending:
        path = pending.pop()
        texts = st.sampled_from([9, 10, 11])
        forks = st.just(FORK) if len(threads) < 8 else texts
        tokens = draw(st.lists(texts | forks, min_size=1, max_size=8))
        num_forks = tokens.count(FORK)
        pending += [f"{path}.{n}" if path else str(n) for n in range(num_forks)]
        threads[path] = [*tokens, END] if draw(st.booleans()) else tokens
    return threads


@settings(max_examples=num_examples(60), deadline=None)
@given(replays())
def test_the_trace_of_a_replay_agrees_with_the_statistics_of_its_tree(
    replay: dict[str, list[int]],
) -> None:
    answer = decode_answer(decoder("vanilla_apar"), PROMPT, TokenChoice.replay(replay))

    expected = tree_statistics(answer.tree, len(PROMPT))
    assert len(answer.trace) == expected.decode_steps
    assert max(step.cached_tokens for step in answer.trace) == expected.max_cached_tokens
    assert sum(step.attended_tokens for step in answer.trace) == expected.attended_tokens
    for thread in answer.threads:
        path = replay_key(thread.thread)
        assert [*thread.token_ids, *([END] if thread.ended else [])] == replay[path]


@settings(max_examples=num_examples(40), deadline=None)
@given(replays(), st.sampled_from([(1,), (2, 2), (12, 12), (20,)]), st.integers(1, 4))
def test_medusa_replays_threads_for_any_proposals_and_limits(
    replay: dict[str, list[int]], top_k: tuple[int, ...], max_threads: int
) -> None:
    choice, limits = TokenChoice.replay(replay), DecodeLimits(max_threads=max_threads)

    vanilla = decode_answer(decoder("vanilla_apar"), PROMPT, choice)
    medusa = decode_answer(decoder("medusa_apar", top_k), PROMPT, choice, limits)

    assert set(medusa.threads) == set(vanilla.threads)
    assert max(step.threads for step in medusa.trace) <= max_threads


@settings(max_examples=num_examples(40), deadline=None)
@given(
    st.lists(st.integers(5, VOCABULARY - 1), min_size=1, max_size=6),
    st.sampled_from([(1,), (2, 2), (5, 3), (20, 2)]),
)
def test_greedy_medusa_and_vanilla_equal_plain_forward_passes(
    prompt: list[int], top_k: tuple[int, ...]
) -> None:
    limits = DecodeLimits(max_tokens=60, max_forks=6)
    vanilla = decode_answer(decoder("vanilla_apar"), prompt, limits=limits)
    medusa = decode_answer(decoder("medusa_apar", top_k), prompt, limits=limits)

    long = {thread.thread: thread for thread in vanilla.threads}
    for thread in medusa.threads:
        # max_tokens applies to all threads together, so threads may be cut at other places.
        if thread.thread in long:
            size = min(len(thread.token_ids), len(long[thread.thread].token_ids))
            assert thread.token_ids[:size] == long[thread.thread].token_ids[:size]
    root = vanilla.threads[0]
    ids = torch.tensor([[*prompt, *root.token_ids]])
    with torch.inference_mode():
        logits = decoder("vanilla_apar").decoding.model(ids).logits[0]
    for place, token_id in enumerate(root.token_ids, start=len(prompt)):
        row = logits[place - 1].clone()
        row[CHILD] = -torch.inf
        if ids[0, place - 1] in (FORK, CHILD):
            row[FORK] = -torch.inf
        assert int(row.argmax()) == token_id


def test_a_sampled_answer_is_reproducible_with_a_seed() -> None:
    for name in DECODER_NAMES:
        limits = DecodeLimits(max_tokens=40)
        answers = [
            decode_answer(decoder(name), PROMPT, TokenChoice.sampled(1.0, 0.9, seed), limits)
            for seed in (1, 1, 2)
        ]

        assert answers[0].threads == answers[1].threads
        assert answers[0].threads != answers[2].threads


def test_new_ids_give_the_text_in_reading_order() -> None:
    replay = {"": [9, FORK, 10, END], "0": [11, 12, 13, END]}
    stream = decoder("vanilla_apar").stream(PROMPT, TokenChoice.replay(replay))

    assert [step.new_ids for step in stream] == [(9,), (), (11,), (12,), (13,), (10,)]


def test_plain_never_generates_a_control_token() -> None:
    answer = decode_answer(decoder("plain"), PROMPT, limits=DecodeLimits(max_tokens=80))

    assert len(answer.threads) == 1
    assert not {FORK, CHILD} & set(answer.threads[0].token_ids)
