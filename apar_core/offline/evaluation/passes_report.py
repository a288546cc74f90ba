"""`apar evaluate passes`: duration of passes by live rows and inputs, and the best trees for them.

Source: Parallel Prompt Decoding (arXiv 2405.18628), section 4.2 and figure 8b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from apar_core.errors import EvaluationError
from apar_core.formats.control_tokens import find_control_tokens
from apar_core.offline.causal_model import load_causal_model
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
from apar_core.offline.evaluation.speed_run import choose_device, choose_dtype
from apar_core.offline.speculation.sparse_tree import SizedTree, TreeFamily, size_curve
from apar_core.reporting import PLOT_SETTINGS, RUN_COLOURS, Column, Report, ReportTable


@dataclass(frozen=True, slots=True)
class PassSettings:
    """Options of a measurement; trees are sized for the tables of the weights that are given."""

    model: str
    model_name: str
    prompt_tokens: Path | None = None
    medusa_heads: Path | None = None
    context: int = 512
    repeats: int = 3
    device: str = "auto"
    dtype: str = "auto"


def run_passes(settings: PassSettings, folder: Path) -> Report:
    """Measure passes, write `passes.json` to the folder and return the report.

    Raises EvaluationError without weights, for a model that cannot be loaded or has a shorter
    context, and CheckpointError for weights without an acceptance table.
    """
    proposers = read_guesses(settings.prompt_tokens, settings.medusa_heads)
    if not proposers:
        raise EvaluationError("nothing to measure: give --prompt-tokens or --medusa-heads")
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    try:
        loaded: Any = load_causal_model(settings.model, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EvaluationError(f"no model in {settings.model!r}: {reason}") from error
    times = measured_passes(
        loaded.to(device).eval(),
        load_tokenizer(settings.model),
        proposers,
        settings.context,
        settings.repeats,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_passes(times, folder / PASSES_FILE)
    machine = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    facts = {
        "Model": settings.model_name,
        "Device": f"{machine}, {dtype}, {torch.get_num_threads()} CPU threads".replace(
            "torch.", ""
        ),
        "Measured": f"median of {settings.repeats} rounds after {settings.context} tokens; a pass "
        "of the decoder, with proposing and choosing tokens",
    }
    return passes_report(times, proposers, facts)


def measured_passes(
    model: Any, tokenizer: Any, proposers: Sequence[Guesses], context: int, repeats: int = 3
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
        )
    return times


def passes_report(
    times: Mapping[ProposerName, PassTimes],
    proposers: Sequence[Guesses],
    facts: Mapping[str, str],
) -> Report:
    """Return the report of measured passes."""
    curves = {
        each.name: {
            rows: size_curve(
                each.table,
                times[each.proposer].pass_s(rows),
                rows,
                ensemble=each.ensemble,
                max_inputs=max(seconds),
            )
            for rows, seconds in times[each.proposer].seconds.items()
        }
        for each in proposers
    }
    by_name = {each.name: times[each.proposer] for each in proposers}
    return Report(
        "Duration of passes",
        facts,
        [_passes(by_name), _sizes(curves)],
        {"passes": _figure(by_name, curves)},
        {"seconds": {name: each.seconds for name, each in times.items()}},
    )


def _passes(times: Mapping[str, PassTimes]) -> ReportTable:
    seconds = {name: each.seconds for name, each in times.items()}
    inputs = sorted({n for by_rows in seconds.values() for row in by_rows.values() for n in row})
    return ReportTable(
        "passes",
        "Milliseconds of a pass by live rows and inputs of a row",
        (
            Column("Proposer"),
            Column("Live rows", "d"),
            *(Column(f"{number}", ".2f") for number in inputs),
        ),
        tuple(
            (name, rows, *(1e3 * row[number] if number in row else None for number in inputs))
            for name, by_rows in seconds.items()
            for rows, row in by_rows.items()
        ),
    )


Curves = Mapping[str, Mapping[int, Sequence[SizedTree]]]
"""Best trees by size, for each proposer and number of live rows."""


def _sizes(curves: Curves) -> ReportTable:
    rows = []
    for name, by_rows in curves.items():
        for number, curve in by_rows.items():
            best = max(curve, key=lambda sized: sized.tokens_per_s)
            gain = best.tokens_per_s / curve[0].tokens_per_s
            rows.append((name, number, best.num_inputs, best.expected_length, gain))
    return ReportTable(
        "sizes",
        "Best size of the candidate trees (predicted)",
        (
            Column("Proposer"),
            Column("Live rows", "d"),
            Column("Inputs", "d"),
            Column("Tokens per step", ".3f"),
            Column("Speed-up", ".2f"),
        ),
        tuple(rows),
        "Tokens per step over the duration of a pass, relative to one input per row. 1 input: "
        "guesses do not pay.",
    )


def _figure(times: Mapping[str, PassTimes], curves: Curves) -> Figure:
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(11, 4), layout="constrained")
        passes, gains = figure.subplots(1, 2)
        for style, (name, each) in zip(("-", "--"), times.items(), strict=False):
            for colour, (rows, row) in zip(RUN_COLOURS, each.seconds.items(), strict=False):
                inputs, label = sorted(row), f"{name}, {rows} rows"
                milliseconds = [1e3 * row[number] for number in inputs]
                passes.plot(inputs, milliseconds, style, color=colour, marker="o", label=label)
                curve = curves[name][rows]
                speeds = [sized.tokens_per_s / curve[0].tokens_per_s for sized in curve]
                sizes = [sized.num_inputs for sized in curve]
                gains.plot(sizes, speeds, style, color=colour, label=label)
        passes.set_title("Duration of a pass")
        passes.set_ylabel("milliseconds")
        gains.set_title("Speed-up by tree size (predicted)")
        gains.set_ylabel("over one input per row")
        gains.axhline(1, color="#9aa5b1", linewidth=0.8)
        for panel in (passes, gains):
            panel.set_xlabel("inputs of a row in a pass")
            panel.legend(frameon=False, fontsize=7)
    return figure
