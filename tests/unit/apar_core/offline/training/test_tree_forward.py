"""Attention masks for SDPA and FlexAttention, and models without full attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from apar_core.errors import TrainingError
from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.training.packing import (
    PackedTree,
    batch_trees,
    tree_attention_mask,
    written_out,
)
from apar_core.offline.training.tree_forward import (
    FLEX_BLOCK_TOKENS,
    attention_mask,
    limited_attention,
    mask_function,
)
from tests.fakes.examples import num_examples
from tests.unit.apar_core.offline.training.random_trees import (
    PAD_ID,
    TOKENS,
    VOCABULARY_SIZE,
    packed,
    random_model,
    tree_loss,
    trees,
)


@settings(max_examples=num_examples(40), deadline=None)
@given(rows=st.lists(trees, min_size=1, max_size=4))
def test_flex_attention_and_sdpa_masks_are_equal(
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


def test_hidden_states_are_equal_with_both_implementations() -> None:
    nested = chain([("a", ParagraphRecord("hgf"))])
    answer = chain([("abc", ParagraphRecord("bcde")), ("ab", nested)], closing="d")
    rows = [packed("ab", answer), packed("a", ParagraphRecord("hg"))]
    batch = batch_trees(rows, PAD_ID, multiple=FLEX_BLOCK_TOKENS)
    sdpa = random_model(num_key_value_heads=2)
    flex = random_model(num_key_value_heads=2, attention="flex_attention")
    flex.load_state_dict(sdpa.state_dict())
    mask = attention_mask(flex, batch)

    # Compiling the attention takes longer than the other tests of this module together.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
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


def test_an_attention_without_tree_masks_is_refused() -> None:
    model = random_model(attention="eager")

    with pytest.raises(TrainingError, match="'eager'"):
        attention_mask(model, batch_trees([packed("a", ParagraphRecord("b"))], PAD_ID))


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
# Every second layer is local; in released models all but every sixth are.
GEMMA: dict[str, Any] = SIZES | {"layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        (LlamaConfig(**SIZES), None),
        (
            Qwen3NextConfig(**SIZES),
            "layer_types: 3 of 4 linear_attention",
        ),
        (
            Gemma3TextConfig(**GEMMA, sliding_window=64),
            "layer_types: 2 of 4 sliding_attention with sliding_window 64, less than 65 tokens",
        ),
        (Gemma3TextConfig(**GEMMA, sliding_window=65), None),
        (
            MistralConfig(**SIZES, sliding_window=64),
            "sliding_attention in every layer with sliding_window 64, less than 65 tokens",
        ),
        (MistralConfig(**SIZES, sliding_window=None), None),
        (Qwen2Config(num_hidden_layers=2, sliding_window=64, use_sliding_window=False), None),
        (
            Llama4TextConfig(**SIZES, attention_chunk_size=32),
            "layer_types: 3 of 4 chunked_attention with attention_chunk_size 32, less than 65 "
            "tokens",
        ),
        (
            GPTNeoConfig(num_layers=2, attention_types=[[["global", "local"], 1]]),
            "attention_layers: 1 of 2 local",
        ),
        (
            RecurrentGemmaConfig(num_hidden_layers=3),
            "model_type: recurrent_gemma has recurrent layers",
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_layers_with_limited_attention_are_named_with_their_field(
    config: PreTrainedConfig, limits: str | None
) -> None:
    assert limited_attention(config, 65) == limits


def test_a_window_as_long_as_the_context_equals_full_attention() -> None:
    torch.manual_seed(3)
    nested = chain([("a", ParagraphRecord("hgf"))])
    tree = packed("ab", chain([("abc", ParagraphRecord("bcde")), ("ab", nested)], closing="d"))
    length = len(tree.token_ids)
    config = Gemma3TextConfig(**GEMMA, sliding_window=length, initializer_range=0.2)
    config._attn_implementation = "sdpa"
    model = Gemma3ForCausalLM(config).eval()

    assert limited_attention(config, length) is None
    found = tree_loss(model, batch_trees([tree], PAD_ID))
    expected = tree_loss(model, batch_trees(written_out(tree, TOKENS), PAD_ID))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
