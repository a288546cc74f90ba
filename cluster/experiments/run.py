"""One experiment from its settings to its files; what a folder has already is not done again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.experiments.cells import CellKey, CellStore
from cluster.experiments.figures import (
    FIGURE_5A,
    FIGURE_5B,
    MIXED,
    STRUCTURED,
    Runner,
    keys_of,
    num_answers,
)
from cluster.experiments.parts import StartStage
from cluster.experiments.report import check_modes, write_experiment
from cluster.experiments.settings import ExperimentSettings


def run_experiments(
    experiments: Sequence[str],
    settings: ExperimentSettings,
    folder: Path,
    start_stage: StartStage,
) -> list[Path]:
    """Do the runs that are missing and write the files; return the pages of result.

    Raises EvaluationError for a table without the mode that it is counted in, a folder with other
    settings, a trace that cannot be read, or an answer that was not generated as recorded.
    """
    check_modes(experiments, settings)
    store = CellStore(folder, settings)
    keys = _keys(experiments, settings)
    if any(store.find(key) is None for key in keys):
        _run(keys, settings, store, start_stage)
    return [write_experiment(name, store, settings, folder) for name in experiments]


def _keys(experiments: Sequence[str], settings: ExperimentSettings) -> list[CellKey]:
    traces = [STRUCTURED] if settings.mixed_trace is None else [STRUCTURED, MIXED]
    # The tables are counted in the runs of figure 5a.
    figures = [FIGURE_5B if name == FIGURE_5B else FIGURE_5A for name in experiments]
    return [key for figure in dict.fromkeys(figures) for key in keys_of(figure, settings, traces)]


def _run(
    keys: Sequence[CellKey],
    settings: ExperimentSettings,
    store: CellStore,
    start_stage: StartStage,
) -> None:
    # These import vLLM, torch and transformers, which take seconds.
    from cluster.experiments.open_engine import model_folder, open_engines
    from cluster.experiments.workload import load_answers, load_experiment_text

    with model_folder(settings) as model_path:
        text = load_experiment_text(settings, model_path)
        workloads = {STRUCTURED: load_answers(settings.trace, settings, text)}
        if settings.mixed_trace is not None:
            workloads[MIXED] = load_answers(settings.mixed_trace, settings, text)
        number = settings.num_engines(len(settings.modes))
        with open_engines(settings, model_path, number) as engines:
            runner = Runner(engines, workloads, settings, store)
            runner.warm_up()
            for group in runner.groups(keys):
                total = sum(num_answers(key, len(workloads[key.trace])) for key in group)
                runner.run(group, start_stage(_title(group), total))


def _title(keys: Sequence[CellKey]) -> str:
    key = keys[0]
    place = f"{key.kv_share:g} of KV" if key.concurrency is None else f"{key.concurrency} at once"
    later = f", round {key.round + 1}" if key.round else ""
    modes = " beside ".join(each.mode for each in keys)
    return f"{key.figure} {key.trace}, {place}{later}, {modes}"
