"""`apar evaluate acceptance`: accuracy of guesses, and tokens per step of trees built from it.

Source: Parallel Prompt Decoding (arXiv 2405.18628), figures 6a (top-k accuracy by distance) and 8a
(tokens per step of dynamic, static and random trees of a size).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, sqrt
from pathlib import Path
from statistics import fmean

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apar_core.errors import EvaluationError
from apar_core.offline.decoders.pass_times import ProposerName
from apar_core.offline.evaluation.layout import columns, figure
from apar_core.offline.evaluation.own_answers import measure_and_write
from apar_core.offline.evaluation.prompt_sets import HELD_OUT, load_prompts
from apar_core.offline.evaluation.replay_text import ModelText
from apar_core.offline.evaluation.speed_run import choose_device
from apar_core.offline.speculation.acceptance import (
    ACCEPTANCE_FILE,
    AcceptanceTable,
    read_table,
)
from apar_core.offline.speculation.medusa_heads import MedusaHeads, load_medusa_heads
from apar_core.offline.speculation.prompt_tokens import (
    PromptTokens,
    check_prompt_tokens,
    load_prompt_tokens,
)
from apar_core.offline.speculation.sparse_tree import (
    dynamic_tree_of_size,
    optimal_tree,
    random_tree,
    static_tree,
)
from apar_core.offline.training.pretrained import load_model, load_tokenizer
from apar_core.reporting import RUN_COLOURS, Report, ReportTable

TREE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Inputs of a row in a pass: last token, candidates and prompt tokens."""

_TOP_K = (1, 5, 10)
_NUM_RANDOM = 20
_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class Guesses:
    """Acceptance table with its proposer's name and ensemble, 0 for Medusa heads.

    `folder` has the weights; None if only the table is at hand.
    """

    proposer: ProposerName
    table: AcceptanceTable
    ensemble: int
    folder: Path | None = None

    @property
    def name(self) -> str:
        """Name in reports."""
        return {"prompt_tokens": "Prompt tokens", "medusa_heads": "Medusa heads"}[self.proposer]


def run_acceptance(
    model: str,
    model_name: str,
    *,
    prompt_tokens: Path | None = None,
    medusa_heads: Path | None = None,
    measure: bool = False,
    prompts: str = HELD_OUT,
    questions: Path | None = None,
    limit: int | None = None,
    max_tokens: int = 1024,
    device: str = "auto",
) -> Report:
    """Return the report; write the tables that are measured beside their weights.

    A table is measured if its folder has none or if `measure` asks for it. The measurement decodes
    answers of up to `max_tokens` to the first `limit` of the `prompts`; `questions` is the folder
    of benchmark files. Raises EvaluationError without weights, and CheckpointError for weights or a
    table that are damaged. Only a measurement notices weights of another model.
    """
    folders = [folder for folder in (prompt_tokens, medusa_heads) if folder is not None]
    if not folders:
        raise EvaluationError("nothing to evaluate: give --prompt-tokens or --medusa-heads")
    for folder in folders:
        if not measure and (folder / ACCEPTANCE_FILE).exists():
            continue
        proposer: PromptTokens | MedusaHeads
        if folder == prompt_tokens:
            proposer = load_prompt_tokens(folder)
        else:
            proposer = load_medusa_heads(folder)
        asked = load_prompts(prompts, questions)[:limit]
        loaded = load_model(model, torch.float32, torch.device(choose_device(device)))
        tokenizer = load_tokenizer(model)
        if isinstance(proposer, PromptTokens):
            check_prompt_tokens(proposer, loaded)
        text = ModelText(tokenizer, model_name)
        prompt_ids = [text.encode_question(question) for question in asked]
        measure_and_write(loaded, tokenizer, proposer, prompt_ids, folder, max_tokens)
    found = read_guesses(prompt_tokens, medusa_heads)
    facts = {"Model": model_name}
    for each, folder in zip(found, folders, strict=True):
        facts |= {
            each.name: str(folder),
            f"{each.name} measured on": each.table.source or "unknown",
        }
    return acceptance_report(found, facts)


def read_guesses(prompt_tokens: Path | None, medusa_heads: Path | None) -> list[Guesses]:
    """Return the tables of the folders that are given.

    Raises CheckpointError for weights or a table that are missing or damaged.
    """
    found = []
    if prompt_tokens is not None:
        ensemble = load_prompt_tokens(prompt_tokens).settings.ensemble
        table = read_table(prompt_tokens)
        found.append(Guesses("prompt_tokens", table, ensemble, prompt_tokens))
    if medusa_heads is not None:
        found.append(Guesses("medusa_heads", read_table(medusa_heads), 0, medusa_heads))
    return found


def tree_lengths(
    table: AcceptanceTable, num_inputs: int, ensemble: int = 1
) -> dict[str, float | None]:
    """Return the expected tokens per step of kinds of trees that have at most `num_inputs`.

    optimal: best trees of all states together. dynamic: the paper's construction with its best
    division into candidates and prompt tokens. static: M prompt tokens after every node. random:
    mean over random trees with the candidates and prompt tokens of `dynamic`. None where no such
    tree exists: predictions of Medusa heads need no inputs, so their optimal tree is a static one.
    """
    most = table.num_distances
    dynamic, num_nodes = None, num_inputs
    division = (num_inputs - 1, most * num_inputs)
    if ensemble:
        best = dynamic_tree_of_size(table, num_inputs, ensemble)
        division, dynamic = best.division, best.expected_length()
        num_nodes = num_inputs // (1 + ensemble * most)
    drawn = (random_tree(table, *division, seed) for seed in range(_NUM_RANDOM))
    return {
        "optimal": optimal_tree(table, num_inputs, ensemble).expected_length(),
        "dynamic": dynamic,
        "static": static_tree(table, num_nodes - 1).expected_length() if num_nodes else None,
        "random": fmean(tree.expected_length() for tree in drawn),
    }


def acceptance_report(
    proposers: Sequence[Guesses], facts: Mapping[str, str], sizes: Sequence[int] = TREE_SIZES
) -> Report:
    """Return the report of one or more proposers."""
    lengths = {
        each.name: {size: tree_lengths(each.table, size, each.ensemble) for size in sizes}
        for each in proposers
    }
    return Report(
        "Acceptance of guessed tokens",
        facts,
        [_accuracy(proposers), _probabilities(proposers), _trees(lengths)],
        {"acceptance": _figure(proposers, lengths)},
        {"acceptance": {each.name: each.table.model_dump() for each in proposers}},
    )


def _accuracy(proposers: Sequence[Guesses]) -> ReportTable:
    rows = []
    for each in proposers:
        known = each.table.observations or (None,) * each.table.num_distances
        everywhere = each.table.accuracy or (None,) * each.table.num_distances
        for distance, (shares, positions, places) in enumerate(
            zip(each.table.top_k(), known, everywhere, strict=True), 1
        ):
            interval = None
            if positions is not None:
                interval = 100 * _NORMAL_95 * sqrt(shares[0] * (1 - shares[0]) / positions)
            tops = [100 * shares[k - 1] if k <= len(shares) else None for k in _TOP_K]
            of_all = [100 * places[k - 1] if places else None for k in _TOP_K]
            rows.append((each.name, distance, positions, tops[0], interval, *tops[1:], *of_all))
    return ReportTable(
        "accuracy",
        "Accuracy of guesses",
        columns(
            "Proposer | Distance :d | Steps :d | Top-1 % :.1f | ± (95 %) :.1f | Top-5 % :.1f | "
            "Top-10 % :.1f | All places: top-1 % :.1f | All places: top-5 % :.1f | "
            "All places: top-10 % :.1f"
        ),
        tuple(rows),
        "Distance 1 is the token after the model's own next token. Top-k: one of the k likeliest "
        "candidates is right, in steps in which all nearer tokens were guessed. A decoder's steps "
        "begin more often where guesses are wrong. All places: whatever the nearer tokens, as in "
        "the paper's tables and figure 6. The interval takes steps as independent.",
    )


def _probabilities(proposers: Sequence[Guesses]) -> ReportTable:
    num_ranks = max(each.table.num_ranks for each in proposers)
    ranks = " | ".join(f"{rank} :.2f" for rank in range(1, num_ranks + 1))
    return ReportTable(
        "probabilities",
        "Acceptance by rank of the candidate, %",
        columns(f"Proposer | Distance :d | {ranks}"),
        tuple(
            (each.name, distance, *(100 * share for share in row), *[None] * (num_ranks - len(row)))
            for each in proposers
            for distance, row in enumerate(each.table.probabilities, 1)
        ),
    )


Lengths = Mapping[str, Mapping[int, Mapping[str, float | None]]]
"""Expected tokens per step by proposer, inputs and kind of tree."""


def _trees(lengths: Lengths) -> ReportTable:
    return ReportTable(
        "trees",
        "Expected tokens per step by kind and size of tree",
        columns(
            "Proposer | Inputs :d | Optimal :.3f | Dynamic (paper) :.3f | Static :.3f | Random :.3f"
        ),
        tuple(
            (name, size, *kinds.values())
            for name, by_size in lengths.items()
            for size, kinds in by_size.items()
        ),
        "Predicted from the table. Inputs: last token, candidates and prompt tokens of a row in a "
        f"pass. Random: mean of {_NUM_RANDOM} trees. Medusa heads predict without inputs.",
    )


def _figure(proposers: Sequence[Guesses], lengths: Lengths) -> Figure:
    styles = ("o-", "s--", "^:")

    def draw_accuracy(panel: Axes) -> None:
        for style, each in zip(styles, proposers, strict=False):
            for distance, shares in enumerate(each.table.accuracy or each.table.top_k(), 1):
                panel.plot(
                    range(1, len(shares) + 1),
                    [100 * share for share in shares],
                    style,
                    color=RUN_COLOURS[(distance - 1) % len(RUN_COLOURS)],
                    markersize=4,
                    label=f"{each.name} @{distance}",
                )
        panel.set_ylim(0, 100)

    def draw_trees(panel: Axes) -> None:
        for style, (name, by_size) in zip(styles, lengths.items(), strict=False):
            for colour, kind in zip(RUN_COLOURS, next(iter(by_size.values())), strict=False):
                found = [kinds[kind] for kinds in by_size.values()]
                values = [float("nan") if value is None else value for value in found]
                if not all(map(isnan, values)):
                    label = f"{name}, {kind}"
                    panel.plot([*by_size], values, style, color=colour, markersize=4, label=label)

    return figure(
        (11, 4),
        ("Accuracy by distance", "k candidates", "top-k accuracy, %", draw_accuracy),
        ("Trees of a size (predicted)", "inputs of a row in a pass", "tokens per step", draw_trees),
    )
