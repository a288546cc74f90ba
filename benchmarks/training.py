"""Packed and written-out training on the same trees and targets, in turn.

A packed tree is one row, and every token is computed once. Written out, each thread is a separate
sequence as in ordinary training, and shared tokens are computed once per thread.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage, ExampleRecord, count_forks
from apar_core.offline.data.structure import extract_tree
from apar_core.offline.training.example_encoder import ExampleEncoder
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, batch_trees, written_out
from apar_core.offline.training.pretrained import load_tokenizer, tree_tokens
from apar_core.offline.training.recipe import TinyModelSettings
from apar_core.offline.training.train_tiny import build_tiny_model
from apar_core.offline.training.tree_forward import summed_tree_loss

TREES_PER_STEP = 8
TIME_LIMIT_S = 60.0
MAX_TOKENS = 8192


@dataclass
class Side:
    """Totals of one way to train."""

    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0


def run(console: Console, trace: Path) -> dict[str, Any]:
    """Print tokens of all trees and the time of a sample, both ways; return plain values."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(str(checkpoint_path()))
    tokens = tree_tokens(tokenizer)
    trees = packed_trees(trace, tokenizer)
    num_packed = sum(len(tree.token_ids) for tree in trees)
    num_written = sum(len(row.token_ids) for tree in trees for row in written_out(tree, tokens))
    model = build_tiny_model(TinyModelSettings(max_positions=MAX_TOKENS), tokenizer)  # type: ignore[arg-type]
    model.train()
    packed, written, num_trees = measure(
        model, trees, lambda tree: written_out(tree, tokens), tokenizer.pad_token_id
    )
    _print(console, packed, written, num_trees)
    console.print(
        f"all {len(trees)} trees: {num_packed:,} tokens packed, {num_written:,} written out: "
        f"{num_written / num_packed:.2f} times as many"
    )
    return {
        "num_trees": len(trees),
        "packed_tokens": num_packed,
        "written_out_tokens": num_written,
        "token_ratio": num_written / num_packed,
        "measured_trees": num_trees,
        "packed": vars(packed),
        "written_out": vars(written),
        "time_ratio": written.seconds / packed.seconds,
    }


def packed_trees(trace: Path, tokenizer: PreTrainedTokenizerBase) -> list[PackedTree]:
    """Return the forked answers of the trace, each after its chat."""
    encoder = ExampleEncoder(tokenizer, MAX_TOKENS)
    trees: list[PackedTree] = []
    with trace.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            answer = extract_tree(record["response"]).tree
            if count_forks(answer):
                messages = (*_history(record["history"]), ChatMessage("user", record["prompt"]))
                trees.append(encoder.pack(ExampleRecord("trace", messages, answer)))
    return trees


def _history(turns: Sequence[dict[str, str]]) -> list[ChatMessage]:
    return [ChatMessage(turn["role"], turn["content"]) for turn in turns]


def measure(
    model: LlamaForCausalLM,
    trees: Sequence[PackedTree],
    threads: Callable[[PackedTree], list[PackedTree]],
    pad_id: int,
) -> tuple[Side, Side, int]:
    """Compute gradients of the same trees both ways in turn, up to the time limit.

    Rows are processed one by one without padding, as in the recipe `apar`.
    """
    order = list(trees)
    random.Random(0).shuffle(order)
    packed, written, num_trees = Side(), Side(), 0
    warm_up = order[:2]
    _step(model, warm_up, pad_id, Side(), tree_mask=True)
    _step(model, threads(warm_up[0]), pad_id, Side(), tree_mask=False)
    for start in range(0, len(order) - TREES_PER_STEP, TREES_PER_STEP):
        if packed.seconds + written.seconds > TIME_LIMIT_S:
            break
        group = order[start : start + TREES_PER_STEP]
        _step(model, group, pad_id, packed, tree_mask=True)
        _step(model, [row for tree in group for row in threads(tree)], pad_id, written,
              tree_mask=False)  # fmt: skip
        num_trees += len(group)
    return packed, written, num_trees


def _step(
    model: LlamaForCausalLM, rows: Sequence[PackedTree], pad_id: int, side: Side, *, tree_mask: bool
) -> None:
    started = time.perf_counter()
    model.zero_grad(set_to_none=True)
    for row in rows:
        batch = batch_trees([row], pad_id)
        # Plain sequences use the fast causal path, as in ordinary training.
        loss = (
            summed_tree_loss(model, batch, model)
            if tree_mask
            else _causal_loss(model, batch.token_ids_BT, batch.targets_BT)
        )
        loss.backward()
        side.loss += loss.item()
    side.seconds += time.perf_counter() - started
    side.rows += len(rows)
    side.tokens += sum(len(row.token_ids) for row in rows)


def _causal_loss(model: LlamaForCausalLM, token_ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
    hidden_BTD = model.model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
    learned_BT = targets_BT != IGNORED_TARGET
    logits_NV = model.lm_head(hidden_BTD[learned_BT])
    return cross_entropy(logits_NV.float(), targets_BT[learned_BT], reduction="sum")


def _print(console: Console, packed: Side, written: Side, num_trees: int) -> None:
    table = Table(title=f"One gradient of {num_trees} trees, apar-tiny's dimensions, one core")
    for name in ("way", "rows", "tokens", "seconds", "trees/s", "summed loss"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for name, side in (("packed", packed), ("written out", written)):
        table.add_row(
            name, f"{side.rows:,}", f"{side.tokens:,}",
            f"{side.seconds:.1f}", f"{num_trees / side.seconds:.2f}", f"{side.loss:.1f}",
        )  # fmt: skip
    table.add_row(
        "written out / packed", f"{written.rows / packed.rows:.2f}",
        f"{written.tokens / packed.tokens:.2f}",
        f"{written.seconds / packed.seconds:.2f}", "", "",
    )  # fmt: skip
    console.print(table)
