"""Packed trees give the same results as their threads written out as ordinary sequences."""

from __future__ import annotations

import copy
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.training.packing import (
    IGNORED_TARGET,
    PackedTree,
    batch_trees,
    join_trees,
    next_indices,
    pack_tree,
    tree_attention_mask,
)
from apar_core.offline.training.tree_forward import learned_logits, summed_tree_loss
from tests.fakes.examples import num_examples

TOKENS = TreeTokens(fork_id=1, child_id=2, end_id=3)
PAD_ID = 0
FIRST_LETTER = 10


def encode(text: str) -> list[int]:
    return [FIRST_LETTER + ord(letter) - ord("a") for letter in text]


@cache
def random_model() -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


texts = st.text("abcdefgh", min_size=1, max_size=6)


def _answers() -> st.SearchStrategy[ParagraphRecord]:
    def forking(inner: st.SearchStrategy[ParagraphRecord]) -> st.SearchStrategy[ParagraphRecord]:
        items = st.lists(st.tuples(texts, inner), min_size=1, max_size=3)
        return st.builds(chain, items, st.text("abcdefgh", max_size=5))

    return st.recursive(st.builds(ParagraphRecord, texts), forking, max_leaves=8)


def row_indices(packed: PackedTree) -> list[list[int]]:
    """Return the row indices that the mask lets each token attend to."""
    mask_TT = tree_attention_mask(batch_trees([packed], PAD_ID))[0, 0]
    return [row.nonzero().flatten().tolist() for row in mask_TT]


@settings(max_examples=num_examples(40), deadline=None)
@given(answers=st.lists(_answers(), min_size=2, max_size=4))
def test_a_row_is_not_affected_by_longer_rows_in_the_batch(answers: list[ParagraphRecord]) -> None:
    model = random_model()
    rows = [pack_tree(encode("ab"), answer, encode, TOKENS) for answer in answers]
    together = batch_trees(rows, PAD_ID)

    def hidden(rows_taken: list[PackedTree]) -> torch.Tensor:
        batch = batch_trees(rows_taken, PAD_ID)
        with torch.inference_mode():
            output: torch.Tensor = model.model(
                input_ids=batch.token_ids_BT,
                position_ids=batch.positions_BT,
                attention_mask=tree_attention_mask(batch),
            ).last_hidden_state
        return output

    all_rows = hidden(rows)
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        torch.testing.assert_close(all_rows[index, :length], hidden([row])[0], rtol=0, atol=1e-5)
    assert torch.isfinite(all_rows).all()
    assert together.token_ids_BT.shape == all_rows.shape[:2]


def test_a_small_tree_is_packed_as_worked_out_by_hand() -> None:
    answer = chain([("a", ParagraphRecord("bc"))], closing="d")

    packed = pack_tree(encode("g"), answer, encode, TOKENS)

    a, b, c, d, g = (encode(letter)[0] for letter in "abcdg")
    assert packed.token_ids == [g, a, 1, 2, b, c, 3, d, 3]
    assert packed.positions == [0, 1, 2, 3, 4, 5, 6, 3, 4]
    no = IGNORED_TARGET
    assert packed.targets == [a, 1, d, b, c, 3, no, 3, no]
    paths = row_indices(packed)
    assert paths[5] == [0, 1, 2, 3, 4, 5]
    assert paths[8] == [0, 1, 2, 7, 8]


def test_each_token_knows_its_successor_in_the_same_thread() -> None:
    answer = chain([("a", ParagraphRecord("bc"))], closing="d")

    packed = pack_tree(encode("g"), answer, encode, TOKENS)

    # g a [Fork] [Child] b c end d end
    assert next_indices(packed) == [1, 2, 7, 4, 5, 6, None, 8, None]


@settings(max_examples=num_examples(30), deadline=None)
@given(answers=st.lists(_answers(), min_size=2, max_size=4))
def test_trees_that_share_a_row_equal_trees_in_separate_rows(
    answers: list[ParagraphRecord],
) -> None:
    model = copy.deepcopy(random_model()).double()
    rows = [pack_tree(encode("ab"[: 1 + at % 2]), answer, encode, TOKENS)
            for at, answer in enumerate(answers)]  # fmt: skip
    joined = join_trees(rows)

    apart = [learned(model, [row]) for row in rows]
    logits, loss, gradients = learned(model, [joined])
    beside, _, _ = learned(model, [joined, rows[0]])

    expected = torch.cat([logits for logits, _, _ in apart])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(beside[: len(logits)], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(loss, sum(loss for _, loss, _ in apart), rtol=0, atol=1e-10)
    for name, gradient in gradients.items():
        summed = sum(gradients[name] for _, _, gradients in apart)
        torch.testing.assert_close(gradient, summed, rtol=0, atol=1e-10)


def learned(
    model: LlamaForCausalLM, rows: list[PackedTree]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits with targets, their summed loss and its gradients."""
    batch = batch_trees(rows, PAD_ID)
    model.zero_grad()
    logits = learned_logits(model, batch, model)
    targets = batch.targets_BT[batch.targets_BT != IGNORED_TARGET]
    loss = cross_entropy(logits, targets, reduction="sum")
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    # Training rounds logits to float32.
    torch.testing.assert_close(
        summed_tree_loss(model, batch, model).double(), loss.double(), rtol=1e-6, atol=0
    )
    return logits.detach(), loss.detach(), gradients


@settings(max_examples=num_examples(40), deadline=None)
@given(answers=st.lists(_answers(), max_size=4))
def test_a_token_of_a_shared_row_reads_only_its_own_tree(answers: list[ParagraphRecord]) -> None:
    rows = [pack_tree(encode("hg"), answer, encode, TOKENS) for answer in answers]
    joined = join_trees(rows)
    batch = batch_trees([joined, *rows], PAD_ID)

    start, expected = 0, []
    for row in rows:
        expected += [[start + index for index in path] for path in row_indices(row)]
        start += len(row.token_ids)
    assert start == len(joined.token_ids)
    assert (row_indices(joined) if rows else []) == expected
    assert batch.num_trees == 2 * len(rows)
    following = [next_indices(row) for row in rows]
    assert len([index for index in next_indices(joined) if index is None]) == sum(
        indices.count(None) for indices in following
    )


def test_a_row_without_trees_has_no_loss_and_gradients_of_zero() -> None:
    model = copy.deepcopy(random_model())

    logits, loss, gradients = learned(model, [join_trees([])])

    assert logits.shape == (0, 40)
    assert loss == 0
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert all(not gradient.any() for gradient in gradients.values())


def test_rows_can_be_padded_to_a_multiple_of_tokens() -> None:
    row = pack_tree(encode("ab"), ParagraphRecord("c"), encode, TOKENS)

    batch = batch_trees([row, row], PAD_ID, multiple=8)

    assert batch.token_ids_BT.shape == (2, 8)
    assert tree_attention_mask(batch)[0, 0, 7].nonzero().tolist() == [[7]]


def test_a_fork_at_the_end_of_a_thread_is_followed_by_its_end() -> None:
    answer = chain([("a", ParagraphRecord("b"))])

    packed = pack_tree(encode("g"), answer, encode, TOKENS)

    assert packed.token_ids[-1] == TOKENS.end_id
    assert packed.targets[2] == TOKENS.end_id
    assert packed.positions[-1] == 3


@settings(max_examples=num_examples(60), deadline=None)
@given(answer=_answers())
def test_no_target_is_a_child_token_or_part_of_the_prompt(answer: ParagraphRecord) -> None:
    prompt = encode("hgf")

    packed = pack_tree(prompt, answer, encode, TOKENS)

    assert TOKENS.child_id not in packed.targets
    assert packed.targets[: len(prompt) - 1] == [IGNORED_TARGET] * (len(prompt) - 1)
    forks = [i for i, token_id in enumerate(packed.token_ids) if token_id == TOKENS.fork_id]
    assert all(packed.token_ids[i + 1] == TOKENS.child_id for i in forks)
    assert all(packed.targets[i] != TOKENS.fork_id for i in forks)
