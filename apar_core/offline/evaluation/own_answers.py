"""The model's own greedy answers, and the acceptance of guesses measured on them.

Source: PPD (arXiv 2405.18628), section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from apar_core.formats.control_tokens import find_control_tokens
from apar_core.offline.decoders.interface import DecodedAnswer, DecodeLimits, decode_answer
from apar_core.offline.decoders.load import load_decoder
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.measure_acceptance import (
    NUM_RANKS,
    Proposer,
    acceptance_table,
    measure_ranks,
)
from apar_core.offline.training.chat_format import turn_end_id
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree
from apar_core.offline.training.pretrained import pad_token_id
from apar_core.offline.training.tree_forward import SDPA


def thread_rows(
    prompt: Sequence[int], answer: DecodedAnswer, end_id: int, child_id: int | None = None
) -> list[PackedTree]:
    """Return each thread as a row whose targets are the thread's own tokens and its end.

    A row has the thread's whole path; `child_id` opens a child's part of it.
    """
    rows = []
    paths: dict[str | None, list[int]] = {None: list(prompt)}
    forks: dict[str | None, list[int]] = {None: []}
    for thread in answer.threads:
        start = paths[None]
        if thread.parent is not None:
            assert child_id is not None
            opened = forks[thread.parent][thread.fork_ordinal]
            start = [*paths[thread.parent][: opened + 1], child_id]
        path = [*start, *thread.token_ids]
        own = range(len(start), len(path))
        paths[thread.thread] = path
        forks[thread.thread] = [at for at in own if path[at] == answer.fork_id]
        ids = [*path, end_id] if thread.ended else path
        targets = [
            ids[at + 1] if len(start) - 1 <= at < len(ids) - 1 else IGNORED_TARGET
            for at in range(len(ids))
        ]
        rows.append(PackedTree(ids, list(range(len(ids))), targets, [0] * len(ids), [None]))
    return rows


def measure_and_write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    max_tokens: int,
    known: dict[str, list[PackedTree]] | None = None,
) -> AcceptanceTable:
    """Measure on the model's greedy answers to prompts; write the table to `folder`.

    Answers fork if the model has control tokens, and have at most `max_tokens` text tokens. Calls
    that share `known` decode the same prompts once.
    """
    # FlexAttention is for training; the decoders' masks are tensors.
    model.set_attn_implementation(SDPA)
    control = find_control_tokens(tokenizer.get_vocab())
    child_id = None if control is None else control.child_id
    known = {} if known is None else known
    rows = known.get(repr(prompts))
    if rows is None:
        name = "plain" if control is None else "vanilla_apar"
        decoder = load_decoder(name, model, tokenizer, device=str(model.device))
        limits, end_id = DecodeLimits(max_tokens=max_tokens), turn_end_id(tokenizer)
        answers = [(each, decode_answer(decoder, each, limits=limits)) for each in prompts]
        rows = [row for each in answers for row in thread_rows(*each, end_id, child_id)]
        known[repr(prompts)] = rows
    banned = () if child_id is None else (child_id,)
    ranks = measure_ranks(model, proposer, rows, banned=banned, pad_id=pad_token_id(tokenizer))
    num_places = sum(len(each) for each in ranks)
    source = f"{len(prompts)} held-out prompts, {len(rows)} threads, {num_places} places, greedy"
    table = acceptance_table(ranks, NUM_RANKS, source)
    table.write(folder)
    return table
