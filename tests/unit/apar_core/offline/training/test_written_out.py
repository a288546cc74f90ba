"""Packed trees give the same results as their threads written out as ordinary sequences."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from apar_core.offline.data.records import ParagraphRecord, chain, count_forks
from apar_core.offline.training.packing import (
    IGNORED_TARGET,
    PackedTree,
    batch_trees,
    tree_attention_mask,
    written_out,
)
from apar_core.offline.training.tree_forward import learned_logits
from tests.fakes.examples import num_examples
from tests.unit.apar_core.offline.training.random_trees import (
    PAD_ID,
    TOKENS,
    answers,
    encode,
    packed,
    random_model,
    texts,
    tree_loss,
    trees,
)

MODELS = {
    "untied, a key for each head": {"num_key_value_heads": 4, "tied": False},
    "grouped keys": {"num_key_value_heads": 2, "tied": False},
    "tied": {"num_key_value_heads": 1, "tied": True},
}


def learned(row: PackedTree) -> list[int]:
    return [target for target in row.targets if target != IGNORED_TARGET]


def loss_and_gradients(model: LlamaForCausalLM, rows: list[PackedTree]) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss = tree_loss(model, batch_trees(rows, PAD_ID))
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(gradients)


def test_a_small_tree_is_written_out_as_worked_out_by_hand() -> None:
    tree = packed("g", chain([("a", ParagraphRecord("bc"))], closing="d"))

    root, child = written_out(tree, TOKENS)

    a, b, c, d, g = (encode(letter)[0] for letter in "abcdg")
    no = IGNORED_TARGET
    assert sorted([list(root.token_ids), list(child.token_ids)], key=len) == [
        [g, a, 1, d, 3],
        [g, a, 1, 2, b, c, 3],
    ]
    targets = {len(row.token_ids): list(row.targets) for row in (root, child)}
    assert targets == {5: [a, 1, d, 3, no], 7: [no, no, no, b, c, 3, no]}


@settings(max_examples=num_examples(100), deadline=None)
@given(prompt=texts, answer=answers(max_leaves=14))
def test_each_thread_is_a_row_and_each_token_is_learned_once(
    prompt: str, answer: ParagraphRecord
) -> None:
    tree = packed(prompt, answer)

    rows = written_out(tree, TOKENS)

    assert len(rows) == tree.num_sequences == 1 + count_forks(answer)
    assert Counter(target for row in rows for target in learned(row)) == Counter(learned(tree))
    assert all(list(row.positions) == list(range(len(row.token_ids))) for row in rows)
    assert all(row.segment_parents == [None] for row in rows)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=num_examples(25), deadline=None)
@given(tree=trees)
def test_packed_loss_and_gradients_equal_written_out_ones(name: str, tree: PackedTree) -> None:
    model = random_model(**MODELS[name])

    loss, gradients = loss_and_gradients(model, [tree])
    plain_loss, plain_gradients = loss_and_gradients(model, written_out(tree, TOKENS))

    torch.testing.assert_close(loss, plain_loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradients, plain_gradients, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=num_examples(25), deadline=None)
@given(rows=st.lists(trees, min_size=1, max_size=3))
def test_packed_logits_equal_those_of_a_plain_forward_pass(
    name: str, rows: list[PackedTree]
) -> None:
    model = random_model(**MODELS[name])
    batch = batch_trees(rows, PAD_ID)
    with torch.inference_mode():
        logits_NV = learned_logits(model, batch, model)

    expected: list[tuple[int, Tensor]] = []
    for tree in rows:
        by_path = {}
        for row in written_out(tree, TOKENS):
            with torch.inference_mode():
                plain_LV = model(input_ids=torch.tensor([row.token_ids])).logits[0]
            for at, target in enumerate(row.targets):
                if target != IGNORED_TARGET:
                    by_path[tuple(row.token_ids[: at + 1])] = plain_LV[at]
        mask_TT = tree_attention_mask(batch_trees([tree], PAD_ID))[0, 0]
        for at, target in enumerate(tree.targets):
            if target != IGNORED_TARGET:
                path = tuple(tree.token_ids[i] for i in mask_TT[at].nonzero().flatten().tolist())
                expected.append((target, by_path[path]))
    wanted_NV = torch.stack([logits for _, logits in expected])
    torch.testing.assert_close(logits_NV, wanted_NV, rtol=0, atol=1e-5)
