"""Decoders of a random model with 24 tokens, and a recorder of its passes."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from apar_core.formats.control_tokens import ControlTokens
from apar_core.offline.decoders.load import (
    HEADED,
    UNFORKED,
    DecoderName,
    ThreadDecoder,
    build_decoder,
)
from apar_core.offline.decoders.proposer import TreesOfRows
from apar_core.offline.decoders.token_chooser import TypicalAcceptance
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.medusa_heads import MedusaHeads, MedusaHeadSettings
from apar_core.offline.speculation.prompt_tokens import PromptTokens
from apar_core.offline.speculation.sparse_tree import SparseTree, static_tree

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


def chain_trees(num_prompts: int) -> tuple[SparseTree, ...]:
    """Return a chain as long as the state, with all prompt tokens behind each node."""
    return tuple(
        SparseTree(
            (0, *range(state)),
            tuple(range(state + 1)),
            (0,) * (state + 1),
            (num_prompts,) * (state + 1),
        )
        for state in range(num_prompts + 1)
    )


def random_sparse_tree(
    draws: random.Random, depth: int, most_prompts: int, num_ranks: int
) -> SparseTree:
    """Return a tree of up to seven candidates, with random prompt tokens behind each node."""
    parents, depths, ranks = [0], [0], [0]

    def add_below(node: int) -> None:
        if depths[node] == depth:
            return
        for rank in draws.sample(range(num_ranks), draws.randint(0, min(3, num_ranks))):
            if len(parents) > 7:
                return
            parents.append(node)
            depths.append(depths[node] + 1)
            ranks.append(rank)
            add_below(len(parents) - 1)

    add_below(0)
    prompts = tuple(draws.randint(0, most_prompts) for _ in parents)
    return SparseTree(tuple(parents), tuple(depths), tuple(ranks), prompts)


def random_trees(
    seed: int, num_prompts: int, num_ranks: int, row_counts: tuple[int, ...] = (1, 2, 4)
) -> TreesOfRows:
    """Return random trees of every state, different ones for each number of rows."""
    draws = random.Random(seed)
    states = {
        rows: tuple(
            random_sparse_tree(draws, state, num_prompts, num_ranks)
            for state in range(num_prompts + 1)
        )
        for rows in row_counts
    }
    return lambda num_rows: states[max(rows for rows in row_counts if rows <= num_rows)]


def prompt_decoder(
    name: DecoderName,
    *,
    seed: int = 0,
    num_prompts: int = 3,
    ensemble: int = 1,
    average: Any = "logits",
    num_ranks: int = 3,
    trees: TreesOfRows | None = None,
    acceptance: TypicalAcceptance | None = None,
) -> ThreadDecoder:
    """Return a decoder with random prompt embeddings and, by default, random trees."""
    model = small_model()
    prompts = PromptTokens.like_text(
        model, num_prompts=num_prompts, ensemble=ensemble, average=average, seed=seed
    )
    torch.manual_seed(seed)
    torch.nn.init.normal_(prompts.embeddings)
    trees = trees or random_trees(seed, num_prompts, num_ranks)
    return build_decoder(
        name,
        model,
        CONTROL,
        frozenset({END}),
        prompts=prompts.double(),
        trees=trees,
        acceptance=acceptance,
    )


@cache
def decoder(name: DecoderName, top_k: tuple[int, ...] = (2, 2)) -> ThreadDecoder:
    if name in ("ppd", "ppd_apar"):
        return prompt_decoder(name)
    model = small_model()
    if UNFORKED.get(name, name) in ("lookup", "recycling"):
        ranks = top_k if UNFORKED.get(name, name) == "recycling" else (1,) * len(top_k)
        table = AcceptanceTable(probabilities=((0.9 / max(ranks),) * max(ranks),) * len(top_k))
        states = static_tree(table, 6).trees
        return build_decoder(name, model, CONTROL, frozenset({END}), trees=lambda _rows: states)
    heads = None
    if name in HEADED:
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
        inputs = named["input_ids"] if "input_ids" in named else named["inputs_embeds"]
        passes.num_rows.append(inputs.shape[0])
        passes.cache = weakref.ref(named["past_key_values"])

    hook = small_model().register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield passes
    finally:
        hook.remove()
