"""`apar experiment fork-cost` from its settings to its report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from apar_core.reporting import Report
from cluster.experiments.parts import PartStore, StartStage
from cluster.experiments.settings import ExperimentSettings


def report_fork_cost(settings: ExperimentSettings, folder: Path, start_stage: StartStage) -> Report:
    """Count what the forks of a trace's answers cost, unless the folder has it, and report it."""
    store = PartStore(folder, settings.as_text())
    kept = store.get_or_do("forks", lambda: _measure_fork_cost(settings, start_stage))
    # Imports vLLM, which takes seconds.
    from apar_core.scheduler.block_sharing import ForkCounters
    from cluster.experiments.cost_plots import fork_cost_figure
    from cluster.experiments.fork_cost import fork_cost_table

    costs = {way: ForkCounters(**values) for way, values in kept.items()}
    table = fork_cost_table(costs, settings.block_size)
    facts = {"Trace": str(settings.trace), "Model": settings.model}
    figures = {"fork-cost": fork_cost_figure(costs)}
    return Report("What a fork costs", facts, [table], figures, {"ways": kept})


def _measure_fork_cost(settings: ExperimentSettings, start_stage: StartStage) -> dict[str, Any]:
    from cluster.experiments.fork_cost import fork_costs
    from cluster.experiments.open_engine import model_folder, open_engine
    from cluster.experiments.program import OneRequest
    from cluster.experiments.workload import load_answers, load_experiment_text

    with model_folder(settings) as path:
        text = load_experiment_text(settings, path)
        answers = load_answers(settings.trace, settings, text)
        submissions = [each for a in answers for each in OneRequest(a, forks=True).start()]
        with open_engine(settings, path) as engine:
            done = start_stage("both ways", 1)
            costs = fork_costs(engine.engine, submissions)
            done()
    return {way: asdict(counters) for way, counters in costs.items()}
