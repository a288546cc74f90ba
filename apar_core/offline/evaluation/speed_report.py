"""The report of a speed evaluation: tables, figures 4 and 6, and the averages as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apar_core.offline.evaluation.measurement import AnswerMeasurement, averages, by_category
from apar_core.offline.evaluation.report_files import Report
from apar_core.offline.evaluation.speed_plots import length_figure, speed_figure
from apar_core.offline.evaluation.speed_tables import SpeedRun, all_tables


def speed_report(title: str, facts: Mapping[str, str], runs: Sequence[SpeedRun]) -> Report:
    """Return the report of at least one run with answers."""
    speeds = speed_figure(runs)
    figures = {"figure6_response_length": length_figure(runs)}
    if speeds is not None:
        figures = {"figure4_speed": speeds, **figures}
    return Report(
        title=title,
        facts=facts,
        tables=all_tables(runs),
        figures=figures,
        data={
            "runs": [
                {
                    "model": run.model,
                    "prompts": run.prompts,
                    "answers": _averages(run.answers),
                    "baseline": _averages(run.baseline),
                }
                for run in runs
            ]
        },
    )


def _averages(answers: Sequence[AnswerMeasurement]) -> dict[str, object]:
    if not answers:
        return {}
    groups = {**by_category(answers), "all": answers}
    return {
        "decoder": answers[0].decoder,
        "averages": {name: averages(group).model_dump() for name, group in groups.items()},
    }
