"""`apar experiment step-curve` from its settings to its report, number of rows by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apar_core.errors import EvaluationError
from apar_core.reporting import Report
from cluster.experiments.parts import PartStore, StartStage
from cluster.experiments.settings import ExperimentSettings

if TYPE_CHECKING:
    from cluster.experiments.step_curve import CurveLoad, StepCurve


def curve_settings(
    *, model: str, load: CurveLoad, engine: Mapping[str, Any] | None
) -> ExperimentSettings:
    """An engine with room for the most rows: one share of the cache, the whole of it."""
    most = max(load.row_counts)
    longest = load.context_tokens + 2 * load.steps + most
    return ExperimentSettings(
        model=model,
        trace=Path(),
        max_tokens=longest,
        kv_tokens=most * (load.context_tokens + 3 * load.steps + 32) + longest,
        kv_shares=(1.0,),
        mixed_kv_shares=(1.0,),
        engine=engine or {},
    )


def report_step_curve(
    settings: ExperimentSettings, load: CurveLoad, folder: Path, start_stage: StartStage
) -> Report:
    """Time steps of each number of rows that the folder does not have, and report all of them.

    Raises EvaluationError for a folder with other settings, or more rows than the engine runs.
    """
    from cluster.experiments.plots import step_figure
    from cluster.experiments.step_curve import CurvePoint, curve_table, fit

    store = PartStore(
        folder, settings.as_text() | {f"load_{k}": str(v) for k, v in asdict(load).items()}
    )
    missing = [rows for rows in load.row_counts if not store.has(_name(rows))]
    if missing:
        _measure_points(missing, settings, load, store, start_stage)
    points = [CurvePoint(**store.find(_name(rows))) for rows in load.row_counts]
    curve = fit(points)
    facts = {
        "Model": settings.model,
        "Rows": f"each attends to a prompt of {load.context_tokens} tokens of its own and to what "
        f"it has generated; {load.steps} steps are timed at each number",
        **_result(curve),
    }
    return Report(
        "The time of a step against its rows",
        facts,
        [curve_table(curve)],
        {"step-curve": step_figure(curve)},
        {"curve": {**asdict(curve), "knee_rows": curve.knee_rows}},
    )


def _result(curve: StepCurve) -> dict[str, str]:
    step = f"{1000 * curve.fixed_s:.2f} ms, and {1000 * curve.row_s:.3f} ms a row"
    if curve.knee_rows is None:
        return {"A step costs": step, "Knee": "none: the points do not lie on such a line"}
    return {
        "A step costs": step,
        "Knee": f"{curve.knee_rows:.0f} rows take as long as what every step costs: below, a row "
        "more is nearly free; far beyond, throughput no longer grows",
    }


def _measure_points(
    missing: Sequence[int],
    settings: ExperimentSettings,
    load: CurveLoad,
    store: PartStore,
    start_stage: StartStage,
) -> None:
    # These import vLLM, which takes seconds.
    from cluster.experiments.open_engine import model_folder, open_engine
    from cluster.experiments.step_curve import measure_point

    with model_folder(settings) as path, open_engine(settings, path) as engine:
        most = engine.scheduler.max_num_running_reqs
        if max(missing) > most:
            raise EvaluationError(
                f"{max(missing)} rows are more than the {most} that the engine runs at once: give "
                "fewer --rows, or more max_num_seqs and max_num_batched_tokens in --engine"
            )
        done = start_stage("numbers of rows", len(missing))
        for rows in missing:
            store.add(_name(rows), asdict(measure_point(engine, rows, load)))
            done()


def _name(rows: int) -> str:
    return f"rows-{rows}"
