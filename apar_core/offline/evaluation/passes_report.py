"""`apar evaluate passes`: duration of passes by live rows and inputs, and the best trees for them.

Source: Parallel Prompt Decoding (arXiv 2405.18628), section 4.2 and figure 8b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apar_core.errors import EvaluationError
from apar_core.formats.control_tokens import find_control_tokens
from apar_core.offline.decoders.load import UNFORKED, ThreadDecoder, load_decoder, load_tokenizer
from apar_core.offline.decoders.pass_times import (
    MEASURED_TOKENS,
    PASSES_FILE,
    PassTimes,
    ProposerName,
    measure_passes,
    measured_trees,
    write_passes,
)
from apar_core.offline.evaluation.acceptance_report import Guesses, read_guesses
from apar_core.offline.evaluation.layout import columns, figure
from apar_core.offline.evaluation.speed_run import choose_device, choose_dtype, load_checkpoint
from apar_core.offline.speculation.sparse_tree import SizedTree, TreeFamily, size_curve
from apar_core.reporting import RUN_COLOURS, Report, ReportTable, ShowProgress


def run_passes(
    folder: Path,
    model: str,
    model_name: str,
    progress: ShowProgress,
    *,
    prompt_tokens: Path | None = None,
    medusa_heads: Path | None = None,
    context: int = 512,
    repeats: int = 3,
    device: str = "auto",
    dtype: str = "auto",
) -> Report:
    """Measure passes, write `passes.json` to the folder and return the report.

    Trees are sized for the tables of the weights that are given. Raises EvaluationError without
    weights, for a model that cannot be loaded or has a shorter context, and CheckpointError for
    weights without an acceptance table.
    """
    proposers = read_guesses(prompt_tokens, medusa_heads)
    if not proposers:
        raise EvaluationError("nothing to measure: give --prompt-tokens or --medusa-heads")
    device = choose_device(device)
    torch_dtype = choose_dtype(dtype, device)
    loaded, tokenizer = load_checkpoint(model, torch_dtype, device), load_tokenizer(model)
    times = measured_passes(loaded, tokenizer, proposers, context, progress, repeats)
    folder.mkdir(parents=True, exist_ok=True)
    write_passes(times, folder / PASSES_FILE)
    machine = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    threads = f"{torch.get_num_threads()} CPU threads"
    facts = {
        "Model": model_name,
        "Device": f"{machine}, {torch_dtype}, {threads}".replace("torch.", ""),
        "Measured": f"median of {repeats} rounds after {context} tokens; a pass "
        "of the decoder, with proposing and choosing tokens",
    }
    return passes_report(times, proposers, facts)


def measured_passes(
    model: Any,
    tokenizer: Any,
    proposers: Sequence[Guesses],
    context: int,
    progress: ShowProgress,
    repeats: int = 3,
) -> dict[ProposerName, PassTimes]:
    """Measure the passes of each proposer's decoder, with forks if the model has control tokens.

    Raises EvaluationError if the context leaves no room.
    """
    room = model.config.max_position_embeddings
    if context + MEASURED_TOKENS > room:
        raise EvaluationError(
            f"--context {context} and {MEASURED_TOKENS} measured tokens exceed the model's context "
            f"of {room} tokens"
        )
    control = find_control_tokens(tokenizer.get_vocab())
    special = set(tokenizer.all_special_ids)
    if control is not None:
        special |= {control.fork_id, control.child_id}
    vocabulary = [token for token in range(model.config.vocab_size) if token not in special]
    times = {}
    on_round = progress.start("pass times", len(proposers) * (repeats + 1))
    for each in proposers:

        def load(family: TreeFamily, each: Guesses = each) -> ThreadDecoder:
            name = "ppd_apar" if each.proposer == "prompt_tokens" else "medusa_apar"
            return load_decoder(
                UNFORKED[name] if control is None else name,
                model,
                tokenizer,
                prompt_tokens=each.folder,
                medusa_heads=each.folder,
                trees=family,
                device=str(model.device),
            )

        times[each.proposer] = measure_passes(
            load,
            measured_trees(each.table, each.ensemble),
            context,
            vocabulary,
            None if control is None else control.fork_id,
            repeats=repeats,
            on_round=on_round,
        )
    return times


def passes_report(
    times: Mapping[ProposerName, PassTimes],
    proposers: Sequence[Guesses],
    facts: Mapping[str, str],
) -> Report:
    """Return the report of measured passes."""
    seconds = {each.name: times[each.proposer].seconds for each in proposers}
    curves = {
        (each.name, rows): size_curve(
            each.table,
            times[each.proposer].pass_s(rows),
            rows,
            ensemble=each.ensemble,
            max_inputs=max(by_inputs),
        )
        for each in proposers
        for rows, by_inputs in times[each.proposer].seconds.items()
    }
    return Report(
        "Duration of passes",
        facts,
        [_passes(seconds), _sizes(curves)],
        {"passes": _figure(seconds, curves)},
        {"seconds": {name: each.seconds for name, each in times.items()}},
    )


Seconds = Mapping[str, Mapping[int, Mapping[int, float]]]
"""Durations of a pass by proposer, live rows and inputs of a row."""

Curves = Mapping[tuple[str, int], Sequence[SizedTree]]
"""Best trees by size, for each proposer and number of live rows."""


def _passes(seconds: Seconds) -> ReportTable:
    inputs = sorted({n for by_rows in seconds.values() for row in by_rows.values() for n in row})
    return ReportTable(
        "passes",
        "Milliseconds of a pass by live rows and inputs of a row",
        columns("Proposer | Live rows :d | " + " | ".join(f"{n} :.2f" for n in inputs)),
        tuple(
            (name, rows, *(1e3 * row[number] if number in row else None for number in inputs))
            for name, by_rows in seconds.items()
            for rows, row in by_rows.items()
        ),
    )


def _sizes(curves: Curves) -> ReportTable:
    rows = []
    for (name, number), curve in curves.items():
        best = max(curve, key=lambda sized: sized.tokens_per_s)
        gain = best.tokens_per_s / curve[0].tokens_per_s
        rows.append((name, number, best.num_inputs, best.expected_length, gain))
    return ReportTable(
        "sizes",
        "Best size of the candidate trees (predicted)",
        columns("Proposer | Live rows :d | Inputs :d | Tokens per step :.3f | Speed-up :.2f"),
        tuple(rows),
        "Tokens per step over the duration of a pass, relative to one input per row. 1 input: "
        "guesses do not pay.",
    )


def _figure(seconds: Seconds, curves: Curves) -> Figure:
    lines = [
        (name, rows, style, colour)
        for style, (name, by_rows) in zip(("-", "--"), seconds.items(), strict=False)
        for colour, rows in zip(RUN_COLOURS, by_rows, strict=False)
    ]

    def draw_passes(panel: Axes) -> None:
        for name, rows, style, colour in lines:
            row, label = seconds[name][rows], f"{name}, {rows} rows"
            milliseconds = [1e3 * row[number] for number in sorted(row)]
            panel.plot(sorted(row), milliseconds, style, color=colour, marker="o", label=label)

    def draw_gains(panel: Axes) -> None:
        for name, rows, style, colour in lines:
            curve, label = curves[name, rows], f"{name}, {rows} rows"
            gains = [sized.tokens_per_s / curve[0].tokens_per_s for sized in curve]
            sizes = [sized.num_inputs for sized in curve]
            panel.plot(sizes, gains, style, color=colour, label=label)
        panel.axhline(1, color="#9aa5b1", linewidth=0.8)

    inputs = "inputs of a row in a pass"
    return figure(
        (11, 4),
        ("Duration of a pass", inputs, "milliseconds", draw_passes),
        ("Speed-up by tree size (predicted)", inputs, "over one input per row", draw_gains),
        font_size=7,
    )
