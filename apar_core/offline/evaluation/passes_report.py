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
from transformers import AutoModelForCausalLM

from apar_core.errors import EvaluationError
from apar_core.offline.decoders.pass_times import (
    PASS_INPUTS,
    PASSES_FILE,
    PassTimes,
    measure_passes,
)
from apar_core.offline.evaluation.acceptance_report import Guesses, read_guesses
from apar_core.offline.evaluation.speed_run import choose_device, choose_dtype
from apar_core.offline.speculation.sparse_tree import SizedTree, size_curve
from apar_core.reporting import PLOT_SETTINGS, RUN_COLOURS, Column, Report, ReportTable


@dataclass(frozen=True, slots=True)
class PassSettings:
    """Options of a measurement; trees are sized for the tables of the weights that are given."""

    model: str
    model_name: str
    prompt_tokens: Path | None = None
    medusa_heads: Path | None = None
    context: int = 512
    repeats: int = 7
    device: str = "auto"
    dtype: str = "auto"


def run_passes(settings: PassSettings, folder: Path) -> Report:
    """Measure passes, write `passes.json` to the folder and return the report.

    Raises EvaluationError for a model that cannot be loaded or has a shorter context, and
    CheckpointError for weights without an acceptance table.
    """
    proposers = read_guesses(settings.prompt_tokens, settings.medusa_heads)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EvaluationError(f"no model in {settings.model!r}: {reason}") from error
    model = loaded.to(device).eval()
    room = model.config.max_position_embeddings
    if settings.context + PASS_INPUTS[-1] > room:
        raise EvaluationError(
            f"--context {settings.context} and {PASS_INPUTS[-1]} inputs exceed the model's context "
            f"of {room} tokens"
        )
    times = measure_passes(model, settings.context, repeats=settings.repeats)
    folder.mkdir(parents=True, exist_ok=True)
    times.write(folder / PASSES_FILE)
    machine = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    facts = {
        "Model": settings.model_name,
        "Device": f"{machine}, {dtype}, {torch.get_num_threads()} CPU threads".replace(
            "torch.", ""
        ),
        "Measured": f"shortest of {settings.repeats} passes behind {settings.context} tokens",
    }
    return passes_report(times, proposers, facts)


def passes_report(
    times: PassTimes, proposers: Sequence[Guesses], facts: Mapping[str, str]
) -> Report:
    """Return the report of measured passes."""
    curves = {
        each.name: {
            rows: size_curve(
                each.table,
                times.pass_s(rows),
                rows,
                ensemble=each.ensemble,
                max_inputs=max(times.seconds[rows]),
            )
            for rows in times.seconds
        }
        for each in proposers
    }
    tables = [_passes(times)]
    if curves:
        tables.append(_sizes(curves))
    return Report(
        "Duration of passes",
        facts,
        tables,
        {"passes": _figure(times, curves)},
        {"seconds": {rows: dict(row) for rows, row in times.seconds.items()}},
    )


def _passes(times: PassTimes) -> ReportTable:
    inputs = sorted({number for row in times.seconds.values() for number in row})
    return ReportTable(
        "passes",
        "Milliseconds of a pass by live rows and inputs of a row",
        (Column("Live rows", "d"), *(Column(f"{number}", ".2f") for number in inputs)),
        tuple(
            (rows, *(1e3 * row[number] if number in row else None for number in inputs))
            for rows, row in times.seconds.items()
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
        "guesses do not pay. Proposing and accepting tokens takes time that is not in it.",
    )


def _figure(times: PassTimes, curves: Curves) -> Figure:
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(11, 4), layout="constrained")
        passes, gains = figure.subplots(1, 2)
        for colour, (rows, row) in zip(RUN_COLOURS, times.seconds.items(), strict=False):
            inputs = sorted(row)
            milliseconds = [1e3 * row[number] for number in inputs]
            passes.plot(inputs, milliseconds, "o-", color=colour, label=f"{rows} rows")
            for style, (name, by_rows) in zip(("-", "--"), curves.items(), strict=False):
                curve = by_rows[rows]
                speeds = [each.tokens_per_s / curve[0].tokens_per_s for each in curve]
                sizes = [each.num_inputs for each in curve]
                gains.plot(sizes, speeds, style, color=colour, label=f"{name}, {rows} rows")
        passes.set_title("Duration of a pass")
        passes.set_ylabel("milliseconds")
        gains.set_title("Speed-up by tree size (predicted)")
        gains.set_ylabel("over one input per row")
        gains.axhline(1, color="#9aa5b1", linewidth=0.8)
        for panel in (passes, gains):
            panel.set_xlabel("inputs of a row in a pass")
            if panel.lines[:-1] or panel is passes:
                panel.legend(frameon=False, fontsize=7)
    return figure
