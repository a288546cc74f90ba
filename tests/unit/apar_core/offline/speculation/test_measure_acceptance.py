"""Ranks of the model's own tokens among proposals, and the tables made of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from apar_core.errors import TrainingError
from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.decoders.interface import (
    DecodedAnswer,
    DecodedThread,
    DecodeLimits,
    decode_answer,
)
from apar_core.offline.decoders.proposer import PromptProposer
from apar_core.offline.evaluation.own_answers import thread_rows
from apar_core.offline.speculation.measure_acceptance import (
    THREAD_ENDED,
    acceptance_table,
    accuracy,
    measure_ranks,
    prompts_of,
    step_starts,
)
from apar_core.offline.speculation.medusa_heads import MedusaHeads
from apar_core.offline.speculation.prompt_tokens import PromptTokens
from apar_core.offline.speculation.sparse_tree import SparseTree
from apar_core.offline.training.packing import IGNORED_TARGET, written_out
from apar_core.tree.thread_names import ThreadId
from tests.unit.apar_core.offline.decoders.small_decoders import (
    CHILD,
    END,
    FORK,
    PROMPT,
    VOCABULARY,
    decoder,
    prompt_decoder,
    random_trees,
    small_model,
)
from tests.unit.apar_core.offline.training.random_trees import TOKENS, encode, packed, random_model

ENDED = THREAD_ENDED


def test_steps_skip_the_tokens_that_they_accept() -> None:
    ranks = torch.tensor([[0, 3], [0, 0], [2, 1], [0, 0], [1, 0], [0, 0], [4, 0], [0, ENDED]])

    # One right guess, then place 2 without any, two right ones from place 3, and the end.
    assert step_starts(ranks) == [0, 2, 3, 6]
    assert step_starts(torch.tensor([[0, ENDED]])) == []


def test_the_table_counts_steps_where_all_nearer_tokens_were_among_the_candidates() -> None:
    first = torch.tensor([[0, 1], [2, 2], [1, 0], [2, 0], [1, 1], [0, ENDED]])
    second = torch.tensor([[1, 2], [0, ENDED]])

    table = acceptance_table([first, second], 2, "two threads")

    # Steps of the first thread: places 0, 2, 3 and 4; of the second one: place 0.
    assert table.probabilities == ((1 / 5, 3 / 5), (1 / 4, 2 / 4))
    assert table.observations == (5, 4)
    assert table.source == "two threads"
    assert table.accuracy == accuracy([first, second], 2)


def test_accuracy_does_not_depend_on_nearer_tokens() -> None:
    ranks = [torch.tensor([[0, 0], [0, 1], [1, 2]]), torch.tensor([[2, 0], [0, ENDED]])]

    assert accuracy(ranks, 2) == ((3 / 5, 4 / 5), (2 / 4, 3 / 4))


def test_accuracy_at_the_start_counts_the_first_twenty_tokens_of_each_thread() -> None:
    ranks = [torch.tensor([[0]] * 20 + [[2]] * 60), torch.tensor([[1]] * 5)]

    table = acceptance_table(ranks, 2)

    assert table.accuracy_at_start == ((20 / 25, 1.0),)
    assert table.accuracy == ((20 / 85, 25 / 85),)


def test_a_distance_that_is_never_reached_is_an_error() -> None:
    with pytest.raises(TrainingError, match=r"none of 1 steps are the guesses up to distance 1"):
        acceptance_table([torch.tensor([[2, 0], [0, ENDED]])], 2)
    with pytest.raises(TrainingError, match=r"none of 0 steps"):
        acceptance_table([torch.tensor([[0, ENDED]])], 2)


def test_threads_of_an_answer_become_rows_as_in_training() -> None:
    tree = packed("hg", chain([("a", ParagraphRecord("bc"))], closing="d"))
    root, child = ThreadId("root"), ThreadId("child")
    fork = TOKENS.fork_id
    threads = (
        DecodedThread(root, None, 0, (*encode("a"), fork, *encode("d")), True),
        DecodedThread(child, root, 0, tuple(encode("bc")), True),
    )

    rows = thread_rows(
        encode("hg"), DecodedAnswer(threads, (), 2, fork), TOKENS.end_id, TOKENS.child_id
    )

    key = str
    assert sorted(rows, key=key) == sorted(
        (
            type(row)(row.token_ids, row.positions, row.targets, row.segments, row.segment_parents)
            for row in written_out(tree, TOKENS)
        ),
        key=key,
    )
    assert prompts_of([tree], 5, seed=0) == [encode("hg")]


def test_a_thread_that_was_cut_off_has_no_end_to_predict() -> None:
    threads = (DecodedThread(ThreadId("root"), None, 0, tuple(encode("ab")), False),)

    (row,) = thread_rows(encode("h"), DecodedAnswer(threads, (), 1, None), TOKENS.end_id)

    assert row.token_ids == encode("hab")
    assert row.targets == [*encode("ab"), IGNORED_TARGET]


def test_prompt_tokens_are_ranked_as_behind_each_prefix_alone() -> None:
    model, ids = random_model(), encode("hgabcde")
    prompts = PromptTokens.like_text(model, num_prompts=2, ensemble=2, seed=3)
    threads = (DecodedThread(ThreadId("root"), None, 0, tuple(ids[2:]), False),)
    rows = thread_rows(ids[:2], DecodedAnswer(threads, (), 2, None), TOKENS.end_id)

    (ranks_NM,) = measure_ranks(model, prompts, rows, num_ranks=40)

    expected = []
    for at in range(1, len(ids) - 2):
        ranks = []
        for d in range(2):
            if at + d + 2 >= len(ids):
                ranks.append(THREAD_ENDED)
                continue
            text = model.get_input_embeddings()(torch.tensor(ids[: at + 1]))
            with torch.no_grad():
                logits_EV = torch.stack(
                    [
                        model(
                            inputs_embeds=torch.cat((text, prompts.embeddings[: d + 1, e]))[None]
                        ).logits[0, -1]
                        for e in range(2)
                    ]
                )
            order = logits_EV.mean(0).argsort(descending=True).tolist()
            ranks.append(order.index(ids[at + d + 2]))
        expected.append(ranks)
    assert ranks_NM.tolist() == expected


def test_heads_are_ranked_by_the_token_as_far_ahead_as_they_propose() -> None:
    model, ids = random_model(), encode("hgabcde")
    output = model.get_output_embeddings().weight.detach()
    heads = MedusaHeads.like_lm_head(output, num_heads=2)
    threads = (DecodedThread(ThreadId("root"), None, 0, tuple(ids[2:]), True),)
    rows = thread_rows(ids[:2], DecodedAnswer(threads, (), 2, None), TOKENS.end_id)

    (ranks_NM,) = measure_ranks(model, heads, rows, num_ranks=40)

    # New heads propose what the model predicts next.
    with torch.no_grad():
        order = model(torch.tensor([ids])).logits[0].argsort(-1, descending=True).tolist()
    whole = [*ids, TOKENS.end_id]
    assert ranks_NM.tolist() == [
        [order[at].index(whole[at + d]) if at + d < len(whole) else THREAD_ENDED for d in (2, 3)]
        for at in range(1, len(whole) - 2)
    ]


def test_the_decoder_accepts_what_the_ranks_measured_in_training_say() -> None:
    """Logits in training equal logits in decoding: each step gains what the ranks predict."""
    limits = DecodeLimits(max_tokens=80)
    plain = decode_answer(decoder("plain"), PROMPT, limits=limits)
    rows = thread_rows(PROMPT, plain, END)
    num_accepted = 0
    for seed in range(8):
        trees = random_trees(seed, 3, 5, row_counts=(1,))
        prompted = prompt_decoder("ppd", seed=seed, ensemble=2, trees=trees)
        proposer = prompted.decoding.proposer
        assert isinstance(proposer, PromptProposer)

        (ranks,) = measure_ranks(
            small_model(), proposer.prompts, rows, banned=(FORK, CHILD), num_ranks=VOCABULARY
        )

        trace = decode_answer(prompted, PROMPT, limits=limits).trace
        expected = predicted_gains(ranks.tolist(), trees(1))
        assert [record.tokens for record in trace][: len(expected)] == expected
        num_accepted += sum(expected) - len(expected)
    assert num_accepted > 10


def predicted_gains(ranks: list[list[int]], states: Sequence[SparseTree]) -> list[int]:
    """Return the tokens of each step of one thread, up to the last step whose ranks are known."""
    # The first step reads the prompt; place 0 is the prompt's last token.
    gains, place, tree, node = [1], 0, states[0], 0
    while True:
        known = ranks[place][: tree.prompts[node]]
        tree, node = states[tree.prompts[node]], 0
        for rank in known:
            follower = next((n for n in tree.children[node] if tree.ranks[n] == rank), None)
            if follower is None:
                break
            node = follower
        place += 1 + tree.depths[node]
        if place >= len(ranks):
            return gains
        gains.append(1 + tree.depths[node])
