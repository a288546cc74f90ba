"""Decoders of a random model with 24 tokens, and a recorder of its passes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from apar_core.formats.control_tokens import ControlTokens
from apar_core.offline.decoders.load import DecoderName, ThreadDecoder, build_decoder
from apar_core.offline.speculation.medusa_heads import MedusaHeads, MedusaHeadSettings

END, FORK, CHILD, VOCABULARY = 2, 3, 4, 24
MAX_POSITIONS = 256
CONTROL = ControlTokens(FORK, CHILD, "[Fork]", "[Child]")
PROMPT = [5, 6, 7, 8]


@cache
def small_model() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.5,
    )
    # In float64, different summation orders differ by 1e-15, too little to affect a choice.
    model: LlamaForCausalLM = LlamaForCausalLM(config).double().eval()
    return model


@cache
def decoder(name: DecoderName, top_k: tuple[int, ...] = (2, 2)) -> ThreadDecoder:
    model = small_model()
    heads = None
    if name == "medusa_apar":
        torch.manual_seed(1)
        sizes = MedusaHeadSettings(hidden_size=16, vocab_size=VOCABULARY)
        heads = MedusaHeads(sizes).double().eval()
    return build_decoder(name, model, CONTROL, frozenset({END}), heads=heads, top_k=top_k)


@dataclass
class Passes:
    """Number of rows of each pass, and the cache of the last pass."""

    num_rows: list[int] = field(default_factory=list)
    cache: weakref.ref[Any] | None = None


@contextmanager
def watched_passes() -> Iterator[Passes]:
    """Record the calls of the small model."""
    passes = Passes()

    def record(_module: Any, _arguments: Any, named: dict[str, Any]) -> None:
        passes.num_rows.append(named["input_ids"].shape[0])
        passes.cache = weakref.ref(named["past_key_values"])

    hook = small_model().register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield passes
    finally:
        hook.remove()
