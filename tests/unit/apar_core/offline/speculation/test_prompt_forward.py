"""Prompt tokens on packed trees: what they read and imitate, and what gradients reach."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import LlamaForCausalLM

from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.speculation.prompt_forward import (
    Insertions,
    PromptCollator,
    insertions,
    prompt_mask,
    prompt_predictions,
)
from apar_core.offline.speculation.prompt_tokens import PromptTokens
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, written_out
from apar_core.offline.training.tree_trainer import Batch, TreeCollator
from tests.fakes.examples import num_examples
from tests.unit.apar_core.offline.training.random_trees import (
    PAD_ID,
    TOKENS,
    packed,
    random_model,
    trees,
)

COLLATOR = PromptCollator(TreeCollator(PAD_ID))
rows_of_trees = st.lists(trees, min_size=1, max_size=3)


def embeddings(num_prompts: int = 3, ensemble: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(num_prompts * 10 + ensemble)
    return torch.randn(num_prompts, ensemble, 32, generator=generator)


def member_logits(
    model: LlamaForCausalLM, prompts_MED: Tensor, batch: Batch, places: Insertions
) -> tuple[Tensor, Tensor]:
    """Return the logits [K, E, V] of each member, and those of the teacher [K, V]."""
    num_prompts, ensemble, _ = prompts_MED.shape
    prompts = PromptTokens.like_text(
        model, num_prompts=num_prompts, ensemble=ensemble, average="learned"
    )
    found, teacher_KV = [], torch.empty(0)
    for member in range(ensemble):
        assert prompts.weights is not None
        prompts.weights.data = torch.eye(ensemble)[member].repeat(num_prompts, 1)
        logits_KV, teacher_KV = prompt_predictions(model, prompts, prompts_MED, batch, places)
        found.append(logits_KV)
    return torch.stack(found, 1), teacher_KV


def path_to(tree: PackedTree, index: int) -> list[int]:
    """Return the row indices on a token's path, the token included."""
    path = [index]
    while path[0] > 0:
        before = path[0] - 1
        segment = tree.segments[path[0]]
        while tree.segments[before] != segment and before >= 0:
            before -= 1
        if before < 0:
            parent = tree.segment_parents[segment]
            assert parent is not None
            before = max(i for i, each in enumerate(tree.segments) if each == parent)
        path.insert(0, before)
    return path


def chains(places: Insertions) -> list[tuple[int, int, int, int]]:
    """Return row, token, prompt token and teacher of each prediction."""
    return [
        (row, int(places.after_BN[row, n]), d, int(places.teacher_BNM[row, n, d]))
        for row, n, d in places.learned_BNM.nonzero().tolist()
    ]


def test_a_small_tree_gives_the_teachers_worked_out_by_hand() -> None:
    tree = packed("hg", chain([("a", ParagraphRecord("bc"))], closing="d"))

    places = insertions(COLLATOR([tree]), 2)

    # The row: 0 h, 1 g, 2 a, 3 [Fork], 4 [Child], 5 b, 6 c, 7 end, 8 d, 9 end
    assert [(after, d, teacher) for _, after, d, teacher in chains(places)] == [
        (1, 0, 2), (1, 1, 3),
        (2, 0, 3), (2, 1, 8),
        (3, 0, 8),
        (4, 0, 5), (4, 1, 6),
        (5, 0, 6),
    ]  # fmt: skip


@settings(max_examples=num_examples(60), deadline=None)
@given(rows=rows_of_trees)
def test_teachers_predict_the_later_tokens_of_the_same_thread(rows: list[PackedTree]) -> None:
    found = chains(insertions(COLLATOR(rows), 3))

    expected = set()
    for number, tree in enumerate(rows):
        for written in written_out(tree, TOKENS):
            path = tuple(written.token_ids)
            for at, target in enumerate(written.targets):
                for d in range(3):
                    if target != IGNORED_TARGET and at + d + 2 < len(path):
                        expected.add((number, path[: at + 1], d, path[at + d + 2]))
    assert {
        (
            row,
            tuple(rows[row].token_ids[index] for index in path_to(rows[row], after)),
            d,
            rows[row].targets[teacher],
        )
        for row, after, d, teacher in found
    } == expected


@settings(max_examples=num_examples(40), deadline=None)
@given(rows=rows_of_trees, share=st.sampled_from([0.1, 0.5, 0.9]), seed=st.integers(0, 5))
def test_a_random_share_of_the_places_is_drawn_per_row(
    rows: list[PackedTree], share: float, seed: int
) -> None:
    batch = COLLATOR(rows)
    every = chains(insertions(batch, 2))

    drawn, again = (
        chains(insertions(batch, 2, share, torch.Generator().manual_seed(seed))) for _ in range(2)
    )

    assert drawn == again
    assert set(drawn) <= set(every)
    for row in range(len(rows)):
        num_all = len({place for place in every if place[0] == row and place[2] == 0})
        num_drawn = len({place for place in drawn if place[0] == row and place[2] == 0})
        assert num_all * share <= num_drawn < num_all * share + 1


@settings(max_examples=10, deadline=None)
@given(rows=rows_of_trees)
def test_teachers_predict_as_if_there_were_no_prompt_tokens(rows: list[PackedTree]) -> None:
    model, batch = random_model(), COLLATOR(rows)
    places = insertions(batch, 2)

    _, teacher_KV = member_logits(model, embeddings(2), batch, places)

    alone = {}
    for row, tree in enumerate(rows):
        for written in written_out(tree, TOKENS):
            with torch.no_grad():
                logits_TV = model(input_ids=torch.tensor([written.token_ids])).logits[0]
            for at, logits_V in enumerate(logits_TV):
                alone[row, tuple(written.token_ids[: at + 1])] = logits_V
    expected_KV = [
        alone[row, tuple(rows[row].token_ids[index] for index in path_to(rows[row], teacher))]
        for row, _, _, teacher in chains(places)
    ]
    if expected_KV:
        torch.testing.assert_close(teacher_KV, torch.stack(expected_KV), rtol=1e-4, atol=1e-4)


@settings(max_examples=10, deadline=None)
@given(tree=trees)
def test_prompt_tokens_predict_in_training_as_behind_the_same_prefix_alone(
    tree: PackedTree,
) -> None:
    """A decoder computes the path as a sequence, followed by one member of each prompt token."""
    model, batch, prompts_MED = random_model(), COLLATOR([tree]), embeddings()
    places = insertions(batch, 3)

    with torch.no_grad():
        logits_KEV, _ = member_logits(model, prompts_MED, batch, places)

    text, alone_EMV = model.get_input_embeddings(), torch.empty(0)
    for logits_EV, (_, after, d, _) in zip(logits_KEV, chains(places), strict=True):
        if d == 0:
            ids = [tree.token_ids[index] for index in path_to(tree, after)]
            with torch.no_grad():
                path_ETD = text(torch.tensor(ids)).expand(2, -1, -1)
                sequence = torch.cat((path_ETD, prompts_MED.transpose(0, 1)), 1)
                alone_EMV = model(inputs_embeds=sequence).logits[:, -3:]
        torch.testing.assert_close(logits_EV, alone_EMV[:, d], rtol=1e-4, atol=1e-4)


def fixed_batch() -> tuple[LlamaForCausalLM, Batch, Insertions]:
    answer = chain([("ab", ParagraphRecord("cd")), ("e", ParagraphRecord("f"))], closing="gh")
    batch = COLLATOR([packed("hg", answer), packed("a", ParagraphRecord("bcde"))])
    return random_model(), batch, insertions(batch, 3)


@pytest.mark.parametrize("member", [0, 1])
def test_no_gradient_passes_between_members_of_an_ensemble(member: int) -> None:
    model, batch, places = fixed_batch()
    prompts_MED = embeddings().requires_grad_()

    logits_KEV, _ = member_logits(model, prompts_MED, batch, places)
    logits_KEV[:, member].square().sum().backward()

    gradient_MED = prompts_MED.grad
    assert gradient_MED is not None
    assert gradient_MED[:, 1 - member].count_nonzero() == 0
    assert (gradient_MED[:, member].abs().sum(-1) > 0).all()


def test_gradients_reach_the_prompt_tokens_before_and_nothing_else() -> None:
    model, batch, places = fixed_batch()
    prompts_MED = embeddings().requires_grad_()
    depth_K = places.learned_BNM.nonzero()[:, 2]

    logits_KEV, teacher_KV = member_logits(model, prompts_MED, batch, places)
    logits_KEV[depth_K == 1].square().sum().backward()

    gradient_MED = prompts_MED.grad
    assert gradient_MED is not None
    assert (gradient_MED[:2].abs().sum(-1) > 0).all()
    assert gradient_MED[2].count_nonzero() == 0
    assert not teacher_KV.requires_grad


def test_masks_of_the_paper_s_figure_12() -> None:
    """Two prompt tokens S1 and S2 of two embeddings each: V1, V2, V3 and V4."""
    model, batch = random_model(), COLLATOR([packed("a", ParagraphRecord("bcd"))])
    after_BP = insertions(batch, 2).after_BN[:, :1].repeat_interleave(4, dim=1)
    expected = {
        "ensemble": [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]],
        "decoder": [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        "encoder": [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]],
    }

    for mask, reads in expected.items():
        found = prompt_mask(model, batch, after_BP, 2, 2, mask)
        assert isinstance(found, Tensor)
        assert found[0, 0, :, -4:].int().tolist() == reads


def test_several_exits_average_the_last_hidden_states() -> None:
    model, batch, places = fixed_batch()
    prompts = PromptTokens.like_text(model, num_prompts=3, exits=2)

    with torch.no_grad():
        found, _ = prompt_predictions(model, prompts, prompts(), batch, places)

    text = model.get_input_embeddings()
    tree = packed("hg", chain([("ab", ParagraphRecord("cd")), ("e", ParagraphRecord("f"))], "gh"))
    _, after, d, _ = chains(places)[0]
    assert d == 0
    ids = [tree.token_ids[index] for index in path_to(tree, after)]
    with torch.no_grad():
        sequence = torch.cat((text(torch.tensor(ids)), prompts.embeddings[:1, 0]))
        states = model(inputs_embeds=sequence[None], output_hidden_states=True).hidden_states
        last = (states[-1][0, -1] + states[-2][0, -1]) / 2
        expected = model.get_output_embeddings()(last)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


def test_each_prompt_token_reads_its_own_prefix_as_in_figure_10() -> None:
    model, batch = random_model(), COLLATOR([packed("a", ParagraphRecord("bcd"))])
    after_BP = insertions(batch, 2).after_BN[:, :1].repeat_interleave(2, dim=1)

    found = prompt_mask(model, batch, after_BP, 2, 1, prefix=True)

    # Keys: the text, P1, P2, S1, S2.
    assert isinstance(found, Tensor)
    assert found[0, 0, :, -4:].int().tolist() == [[1, 0, 1, 0], [0, 1, 1, 1]]


def test_a_prefix_changes_and_learns_from_its_own_prompt_tokens_only() -> None:
    model, batch, places = fixed_batch()
    prompts = PromptTokens.like_text(model, num_prompts=3, prefix=True)
    assert prompts.prefix is not None
    depth_K = places.learned_BNM.nonzero()[:, 2]

    before_KV, teacher_KV = prompt_predictions(model, prompts, prompts(), batch, places)
    before_KV[depth_K == 1].square().sum().backward()

    gradient_M = prompts.prefix.grad.abs().sum((0, 1, 3, 4))  # type: ignore[union-attr]
    # The second prompt token reads the first one, which has read its own prefix.
    assert gradient_M[0] > 0
    assert gradient_M[1] > 0
    assert gradient_M[2] == 0
    with torch.no_grad():
        prompts.prefix[:, :, 1] += 1
        after_KV, same_KV = prompt_predictions(model, prompts, prompts(), batch, places)
    changed_K = (after_KV - before_KV).abs().amax(1) > 1e-4
    assert not changed_K[depth_K == 0].any()
    assert changed_K[depth_K == 1].all()
    assert torch.equal(same_KV, teacher_KV)


def test_a_head_of_their_own_starts_with_the_predictions_of_the_output_layer() -> None:
    model, batch, places = fixed_batch()
    plain = PromptTokens.like_text(model, num_prompts=3)
    headed = PromptTokens.like_text(model, num_prompts=3, head=True)
    expected, teacher = prompt_predictions(model, plain, plain(), batch, places)

    found, same = prompt_predictions(model, headed, headed(), batch, places)
    found.square().sum().backward()

    torch.testing.assert_close(found, expected)
    assert torch.equal(same, teacher)
    assert headed.head is not None
    assert headed.head.grad is not None


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("mask", ["ensemble", "decoder", "encoder"])
@settings(max_examples=6, deadline=None)
@given(rows=rows_of_trees)
def test_flex_attention_and_sdpa_masks_are_equal(
    mask: str, prefix: bool, rows: list[PackedTree]
) -> None:
    batch = COLLATOR(rows)
    after_BP = insertions(batch, 3).after_BN.repeat_interleave(6, dim=1)

    expected, flex = (
        prompt_mask(model, batch, after_BP, 3, 2, mask, prefix=prefix)
        for model in (random_model(), random_model(attention="flex_attention"))
    )

    assert isinstance(expected, Tensor)
    assert isinstance(flex, BlockMask)
    num_rows, _, num_queries, num_keys = expected.shape
    row, query, key = torch.meshgrid(
        torch.arange(num_rows), torch.arange(num_queries), torch.arange(num_keys), indexing="ij"
    )
    assert torch.equal(flex.mask_mod(row, torch.zeros_like(row), query, key), expected[:, 0])
