"""The same mask for SDPA and for FlexAttention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask

from apar_core.data.records import ParagraphRecord, chain
from apar_core.errors import TrainingError
from apar_core.training.packing import PackedTree, batch_trees, tree_attention_mask
from apar_core.training.tree_attention import FLEX_BLOCK_TOKENS, attention_mask, mask_function
from tests.unit.apar_core.training.random_trees import PAD_ID, packed, random_model, trees


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(trees, min_size=1, max_size=4))
def test_the_function_for_flex_attention_says_what_the_mask_for_sdpa_says(
    rows: list[PackedTree],
) -> None:
    batch = batch_trees(rows, PAD_ID, multiple=8)
    num_rows, width = batch.token_ids_BT.shape
    reads = mask_function(batch)
    row_BTT, query_BTT, key_BTT = torch.meshgrid(
        torch.arange(num_rows), torch.arange(width), torch.arange(width), indexing="ij"
    )

    said_BTT = reads(row_BTT, torch.tensor(0), query_BTT, key_BTT)

    assert torch.equal(said_BTT, tree_attention_mask(batch)[:, 0])


def test_the_hidden_states_are_the_same_with_both() -> None:
    nested = chain([("a", ParagraphRecord("hgf"))])
    answer = chain([("abc", ParagraphRecord("bcde")), ("ab", nested)], closing="d")
    rows = [packed("ab", answer), packed("a", ParagraphRecord("hg"))]
    batch = batch_trees(rows, PAD_ID, multiple=FLEX_BLOCK_TOKENS)
    sdpa = random_model(num_key_value_heads=2)
    flex = random_model(num_key_value_heads=2, attention="flex_attention")
    flex.load_state_dict(sdpa.state_dict())
    mask = attention_mask(flex, batch)

    with torch.no_grad():
        expected, found = (
            model.model(
                input_ids=batch.token_ids_BT,
                position_ids=batch.positions_BT,
                attention_mask=attention_mask(model, batch),
            ).last_hidden_state
            for model in (sdpa, flex)
        )

    assert isinstance(mask, BlockMask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_an_attention_without_such_masks_is_refused() -> None:
    model = random_model(attention="eager")

    with pytest.raises(TrainingError, match="'eager'"):
        attention_mask(model, batch_trees([packed("a", ParagraphRecord("b"))], PAD_ID))
