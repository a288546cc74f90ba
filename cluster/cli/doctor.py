"""`apar doctor`: what is installed, what the machine has, and what a checkpoint is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from apar_core.errors import CheckpointError
from cluster.config.model import DEFAULT_MODEL, PRESETS
from cluster.diagnosis import Finding, diagnose

if TYPE_CHECKING:
    from apar_core.engine.checkpoint import CheckpointReport


def doctor(
    model: Annotated[
        str,
        typer.Option(
            help=f"Checkpoint to look at: one of {', '.join(PRESETS)}, a folder or a hub name."
        ),
    ] = DEFAULT_MODEL,
) -> None:
    """Check packages, machine and checkpoint; exits with 1 if something is wrong.

    Tells whether a checkpoint is an APAR one and which control tokens it has. No weight is loaded.
    """
    findings = [*diagnose(), *check_checkpoint(model)]
    table = Table(show_header=False, box=None)
    for finding in findings:
        mark = Text("!", style="bold red") if finding.problem else Text("✓", style="green")
        value = Text(finding.value)
        if finding.problem:
            value.append(f"\n{finding.problem}", style="red")
        table.add_row(mark, finding.name, value)
    Console().print(table)
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)


def check_checkpoint(model: str) -> list[Finding]:
    """Findings about a preset, folder or hub name."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM takes seconds to import, and `apar --help` should not wait for it.
    from apar_core.engine.checkpoint import inspect_checkpoint

    path = PRESETS[model].path if model in PRESETS else model
    try:
        return [Finding("checkpoint", path), *describe(inspect_checkpoint(path))]
    except CheckpointError as error:
        return [Finding("checkpoint", path, str(error))]


def describe(report: CheckpointReport) -> list[Finding]:
    """A checkpoint's facts as findings."""
    parameters = "unknown" if report.num_parameters is None else f"{report.num_parameters:,}"
    size = "not on this machine"
    if report.weights_bytes is not None:
        size = f"{report.weights_bytes / 2**20:,.1f} MiB"
    findings = [
        Finding("architecture", f"{report.architecture} ({report.model_type}, {report.dtype})"),
        Finding("parameters", parameters),
        Finding("weights", size),
        Finding("context", f"{report.max_positions:,} tokens"),
        Finding("vocabulary", f"{report.vocabulary_size:,} ({report.num_embeddings:,} embeddings)"),
    ]
    tokens = report.control_tokens
    if tokens is None:
        return [*findings, Finding("forks", "no: an ordinary model, served without forking")]
    control = f"{tokens.fork_text} {tokens.fork_id}, {tokens.child_text} {tokens.child_id}"
    return [*findings, Finding("forks", f"yes, an APAR checkpoint: {control}")]
