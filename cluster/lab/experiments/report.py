"""Experiments, from settings to report; runs that a folder already has are not repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from apar_core.errors import EvaluationError
from apar_core.reporting import Report
from cluster.lab.experiments.methods import EAGER, SEQUENTIAL
from cluster.lab.experiments.parts import StartStage
from cluster.lab.experiments.runs import Run, RunStore, do_runs
from cluster.lab.experiments.settings import (
    FIGURE_5A,
    FIGURE_5B,
    PEERS,
    ExperimentSettings,
    RunKey,
    keys_of,
)
from cluster.lab.experiments.tables import (
    Comparison,
    claim_table,
    comparisons,
    concurrency_table,
    device_label,
    ratio_table,
    run_table,
    saving_table,
    sentence_table,
)
from cluster.loadtest.trace import read_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from apar_core.reporting import ReportTable

TABLE_1: Literal["table1"] = "table1"
TABLE_2: Literal["table2"] = "table2"
ALL = "all"
EXPERIMENTS = (FIGURE_5A, FIGURE_5B, TABLE_1, TABLE_2, PEERS)

_TITLES = {
    FIGURE_5A: "Figure 5a: throughput by KV memory",
    FIGURE_5B: "Figure 5b: mean latency by concurrency",
    TABLE_1: "Table 1: max cached tokens",
    TABLE_2: "Table 2: attended tokens",
    PEERS: "Methods of parallel answering",
    ALL: "Forking against sequential decoding",
}


def run_experiment(
    name: str,
    settings: ExperimentSettings,
    folder: Path,
    start_stage: StartStage,
    *,
    workers: int = 1,
) -> Report:
    """Execute the missing runs of an experiment and report all of them.

    Raises EvaluationError for table 1 or 2 without the eager method, a folder with other settings,
    a trace that cannot be read, or an answer that differs from the recorded one.
    """
    parts = EXPERIMENTS if name == ALL else (name,)
    if {TABLE_1, TABLE_2} & set(parts) and EAGER not in settings.methods:
        raise EvaluationError(
            f"--methods {','.join(settings.methods)} lacks {EAGER}, in whose runs tables 1 and 2 "
            "are counted"
        )
    for path in settings.traces.values():
        # Fail before engines are started.
        read_trace(path, limit=1)
    keys = keys_of(tuple(dict.fromkeys(_RUNS_OF.get(part, part) for part in parts)), settings)
    store = RunStore(folder, settings)
    do_runs(keys, settings, store, start_stage, workers=workers)
    return build_report(name, settings, store.lines)


# The tables are counted in the runs of figure 5a.
_RUNS_OF = {TABLE_1: FIGURE_5A, TABLE_2: FIGURE_5A}


def build_report(name: str, settings: ExperimentSettings, runs: Mapping[RunKey, Run]) -> Report:
    """Return the report of an experiment whose runs are complete."""
    parts = EXPERIMENTS if name == ALL else (name,)
    found = {
        part: comparisons(keys_of((part,), settings), runs)
        for part in (FIGURE_5A, FIGURE_5B, PEERS)
        if part in parts
    }
    tables: list[ReportTable] = []
    if found:
        every = list({each.key: each for group in found.values() for each in group}.values())
        if name != PEERS:
            figures = [*found.get(FIGURE_5A, ()), *found.get(FIGURE_5B, ())]
            tables.append(claim_table(figures, settings))
            said = sentence_table(figures, settings)
            by_concurrency = concurrency_table(found.get(FIGURE_5A, ()), settings)
            tables += [table for table in (said, by_concurrency) if table is not None]
        forking = [each for each in every if each.key.method != SEQUENTIAL]
        tables += [ratio_table(forking, settings), run_table(every, settings)]
    if TABLE_1 in parts:
        tables += _saving_tables(TABLE_1, settings, runs)
    if TABLE_2 in parts:
        tables += _saving_tables(TABLE_2, settings, runs)
    return Report(
        f"{_TITLES[name]}, {settings.origin(', '.join(settings.devices))}",
        _facts(settings),
        tables,
        _figures(found, settings),
        {"settings": settings.as_text()},
    )


def _facts(settings: ExperimentSettings) -> dict[str, str]:
    limits = {model: settings.limit(model) for model in settings.models}
    facts = {
        "Model": ", ".join(f"{name} (at most {limit} requests)" for name, limit in limits.items()),
        "Requests": f"{settings.answers} at once from {_names(settings)}, repeated if there are "
        f"fewer; prompt and answer have at most {settings.max_tokens} tokens; every answer was "
        "compared with the recorded one",
    }
    if not settings.is_virtual:
        facts["Times"] = f"measured on {', '.join(settings.devices)}; methods ran one after another"
        return facts
    facts["Times"] = (
        "predicted: vLLM's scheduler and KV-cache manager and the forks are real, and the duration "
        "of each step is modeled"
    )
    for model in settings.models:
        for device in settings.devices:
            costs, num_blocks = settings.virtual_device(model, device)
            cache = f"{num_blocks * settings.block_size:,} KV tokens"
            facts[f"{model} on {device}"] = f"{cache}; step times: {costs.source}"
    return facts


def _names(settings: ExperimentSettings) -> str:
    return " and ".join(f"{path.name} ({name})" for name, path in settings.traces.items())


def _saving_tables(
    table: Literal["table1", "table2"], settings: ExperimentSettings, runs: Mapping[RunKey, Run]
) -> list[ReportTable]:
    """Return a table for each trace and model; its counts do not depend on GPU or memory."""
    keys = [key for key in keys_of((FIGURE_5A,), settings) if key.method == EAGER]
    chosen = {(key.trace, key.model): key for key in reversed(keys)}
    return [saving_table(runs[key], table, settings) for key in reversed(chosen.values())]


def _figures(
    found: Mapping[str, Sequence[Comparison]], settings: ExperimentSettings
) -> dict[str, Figure]:
    # matplotlib takes a second to import.
    from cluster.lab.experiments.plots import latency_figure, peers_figure, throughput_figure

    draw = {FIGURE_5A: throughput_figure, FIGURE_5B: latency_figure, PEERS: peers_figure}
    figures: dict[str, Figure] = {}
    for part, group in found.items():
        # A figure for each device, so that panels stay readable.
        for device in settings.devices:
            panels: dict[str, list[Comparison]] = {}
            for each in group:
                if each.key.device == device:
                    panels.setdefault(_panel_title(each, part, settings), []).append(each)
            name = part if len(settings.devices) == 1 else f"{part}-{device}"
            figures[name] = draw[part](panels)
    return figures


def _panel_title(each: Comparison, part: str, settings: ExperimentSettings) -> str:
    key = each.key
    share = f", {key.kv_share:g} of KV" if part == PEERS else ""
    return f"{key.model}, {key.trace}{share}\n{device_label(key, settings)}"
