"""Random trees over a small alphabet, and small random models for them."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, TreeBatch, pack_tree
from apar_core.offline.training.tree_forward import summed_tree_loss

TOKENS = TreeTokens(fork_id=1, child_id=2, end_id=3)
PAD_ID = 0
VOCABULARY_SIZE = 40
_FIRST_LETTER = 10


def encode(text: str) -> list[int]:
    return [_FIRST_LETTER + ord(letter) - ord("a") for letter in text]


texts = st.text("abcdefgh", min_size=1, max_size=6)


def answers(max_leaves: int = 8) -> st.SearchStrategy[ParagraphRecord]:
    def forking(inner: st.SearchStrategy[ParagraphRecord]) -> st.SearchStrategy[ParagraphRecord]:
        items = st.lists(st.tuples(texts, inner), min_size=1, max_size=3)
        return st.builds(chain, items, st.text("abcdefgh", max_size=5))

    return st.recursive(st.builds(ParagraphRecord, texts), forking, max_leaves=max_leaves)


def packed(prompt: str, answer: ParagraphRecord) -> PackedTree:
    return pack_tree(encode(prompt), answer, encode, TOKENS)


trees = st.builds(packed, texts, answers())


@cache
def random_model(
    *, num_key_value_heads: int = 4, tied: bool = False, attention: str = "sdpa"
) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    config._attn_implementation = attention
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def tree_loss(model: LlamaForCausalLM, batch: TreeBatch) -> Tensor:
    """Return the mean loss over all targets of the batch."""
    return summed_tree_loss(model, batch, model) / (batch.targets_BT != IGNORED_TARGET).sum()
