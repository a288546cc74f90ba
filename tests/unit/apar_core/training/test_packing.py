"""A packed tree must mean the same to the model as its threads written out one by one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from apar_core.data.records import ParagraphRecord, chain, thread_paragraphs
from apar_core.training.packing import (
    IGNORED_TARGET,
    PackedTree,
    TreeTokens,
    batch_trees,
    pack_tree,
    tree_attention_mask,
)
from apar_core.training.train_tiny import tree_loss

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


def written_out(
    prefix: list[int], first: ParagraphRecord
) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield every thread as one sequence with a mark on the tokens that take loss."""
    sequence, learned = list(prefix), [False] * len(prefix)
    children = []
    for paragraph in thread_paragraphs(first):
        new = encode(paragraph.text) + ([TOKENS.fork_id] if paragraph.first_child else [])
        sequence += new
        learned += [True] * len(new)
        if paragraph.first_child:
            children.append(([*sequence, TOKENS.child_id], paragraph.first_child))
    yield [*sequence, TOKENS.end_id], [*learned, True]
    for child_prefix, child in children:
        yield from written_out(child_prefix, child)


def row_indices(packed: PackedTree) -> list[list[int]]:
    """Return, for each token of the row, the row indices of its path, found by the mask."""
    mask = tree_attention_mask(packed)
    return [row.nonzero().flatten().tolist() for row in mask]


@settings(max_examples=40, deadline=None)
@given(prompt=texts, answer=_answers())
def test_packed_logits_and_loss_equal_those_of_each_thread_written_out(
    prompt: str, answer: ParagraphRecord
) -> None:
    model = random_model()
    packed = pack_tree(encode(prompt), answer, encode, TOKENS)
    batch = batch_trees([packed], PAD_ID)
    with torch.inference_mode():
        logits = model(
            input_ids=batch.token_ids_BT,
            position_ids=batch.positions_BT,
            attention_mask=batch.mask_B1TT,
        ).logits[0]
        packed_loss = tree_loss(model, batch)

    by_path = {
        tuple(packed.token_ids[i] for i in path): logits[path[-1]] for path in row_indices(packed)
    }
    targets: list[int] = []
    predictions = []
    for sequence, learned in written_out(encode(prompt), answer):
        with torch.inference_mode():
            plain = model(input_ids=torch.tensor([sequence])).logits[0]
        for length in range(1, len(sequence) + 1):
            wanted = by_path[tuple(sequence[:length])]
            torch.testing.assert_close(wanted, plain[length - 1], rtol=0, atol=1e-5)
        for index in range(1, len(sequence)):
            if learned[index]:
                targets.append(sequence[index])
                predictions.append(plain[index - 1])
    plain_loss = cross_entropy(torch.stack(predictions), torch.tensor(targets))
    assert sum(target != IGNORED_TARGET for target in packed.targets) == len(targets)
    assert packed_loss.item() == pytest.approx(plain_loss.item(), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(answers=st.lists(_answers(), min_size=2, max_size=4))
def test_a_row_is_not_changed_by_longer_rows_beside_it(answers: list[ParagraphRecord]) -> None:
    model = random_model()
    rows = [pack_tree(encode("ab"), answer, encode, TOKENS) for answer in answers]
    together = batch_trees(rows, PAD_ID)

    def hidden(rows_taken: list[PackedTree]) -> torch.Tensor:
        batch = batch_trees(rows_taken, PAD_ID)
        with torch.inference_mode():
            output: torch.Tensor = model.model(
                input_ids=batch.token_ids_BT,
                position_ids=batch.positions_BT,
                attention_mask=batch.mask_B1TT,
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


def test_a_fork_at_the_end_of_a_thread_is_followed_by_its_end() -> None:
    answer = chain([("a", ParagraphRecord("b"))])

    packed = pack_tree(encode("g"), answer, encode, TOKENS)

    assert packed.token_ids[-1] == TOKENS.end_id
    assert packed.targets[2] == TOKENS.end_id
    assert packed.positions[-1] == 3


@settings(max_examples=60, deadline=None)
@given(answer=_answers())
def test_no_target_is_a_child_token_or_part_of_the_prompt(answer: ParagraphRecord) -> None:
    prompt = encode("hgf")

    packed = pack_tree(prompt, answer, encode, TOKENS)

    assert TOKENS.child_id not in packed.targets
    assert packed.targets[: len(prompt) - 1] == [IGNORED_TARGET] * (len(prompt) - 1)
    forks = [i for i, token_id in enumerate(packed.token_ids) if token_id == TOKENS.fork_id]
    assert all(packed.token_ids[i + 1] == TOKENS.child_id for i in forks)
    assert all(packed.targets[i] != TOKENS.fork_id for i in forks)
