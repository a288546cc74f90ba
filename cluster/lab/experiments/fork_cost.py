"""Tokens and blocks that a fork costs, compared with the same forks through prefix caching.

Clients that fork by sending new completions rely on prefix caching: each child looks for its prefix
in the cache, which holds only whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apar_core.errors import EngineError, EvaluationError
from apar_core.reporting import Report, ReportTable
from cluster.lab.experiments.parts import PartStore, StartStage
from cluster.lab.experiments.program import ReplayedRequest, Submission
from cluster.lab.experiments.settings import STRUCTURED, ExperimentSettings
from cluster.lab.plots import panels
from cluster.lab.tables import Value, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.scheduler.block_sharing import BlockSharing, ForkCounters

SHARED, CACHED = "block sharing (ours)", "prefix caching (client-side)"
_BAR_HEIGHT = 0.6
_OURS, _OTHERS = "#2f6f9f", "#9aa5b1"


def report_fork_cost(settings: ExperimentSettings, folder: Path, start_stage: StartStage) -> Report:
    """Count the costs of the forks in a trace's answers, unless the folder has them."""
    store = PartStore(folder, {**settings.as_text(), "model": settings.models[0]})
    kept = store.get_or_do("forks", lambda: _measure(settings, start_stage))
    # Imports vLLM, which takes seconds.
    from apar_core.scheduler.block_sharing import ForkCounters

    costs = {way: ForkCounters(**values) for way, values in kept.items()}
    facts = {
        "Trace": str(settings.trace),
        "Engine": f"{settings.models[0]}, {'without a model' if settings.is_virtual else 'real'}: "
        "counts do not depend on step times",
    }
    table = fork_cost_table(costs, settings.block_size)
    figures = {"fork-cost": fork_cost_figure(costs)}
    return Report("Cost of a fork", facts, [table], figures, {"ways": kept})


def fork_costs(engine: OfflineEngine, submissions: Sequence[Submission]) -> dict[str, ForkCounters]:
    """Generate the answers both ways, and return the costs of their forks.

    Raises EvaluationError if none of them forks.
    """
    sharing: BlockSharing = engine.scheduler.block_sharing
    shared = _counters(engine, submissions)
    sharing.enabled = False
    try:
        cached = _counters(engine, submissions)
    finally:
        sharing.enabled = True
    if shared.forks == 0:
        raise EvaluationError(f"none of {len(submissions)} answers forks")
    return {SHARED: shared, CACHED: cached}


def fork_cost_table(costs: Mapping[str, ForkCounters], block_size: int) -> ReportTable:
    """Return tokens computed and blocks copied per fork, and shared prompt tokens."""

    def per_fork(title: str, form: str, name: str) -> Value:
        return Value(title, form, lambda each: getattr(each[1], name) / each[1].forks)

    return table_of(
        "fork-cost",
        f"Cost of a fork: {costs[SHARED].forks} forks, blocks of {block_size} tokens",
        costs.items(),
        (
            Value("method", "", lambda each: each[0]),
            per_fork("tokens computed per fork", ".2f", "computed_tokens"),
            per_fork("blocks copied per fork", ".2f", "copied_blocks"),
            per_fork("tokens shared per fork", ".1f", "shared_tokens"),
            Value("without KV to share", ".0f", lambda each: each[1].fallbacks),
        ),
    )


def fork_cost_figure(costs: Mapping[str, ForkCounters]) -> Figure:
    """Return tokens computed and blocks copied per fork, with a bar for each method."""
    with panels(1, 2, (11, 2.4), sharey=True) as (figure, ((computed, copied),)):
        _draw(computed, costs, lambda counters: counters.computed_tokens)
        computed.set(title="Tokens computed per fork", xlabel="tokens")
        _draw(copied, costs, lambda counters: counters.copied_blocks)
        copied.set(title="Blocks copied per fork", xlabel="blocks")
        computed.invert_yaxis()
    return figure


def _draw(
    panel: Axes, costs: Mapping[str, ForkCounters], value: Callable[[ForkCounters], int]
) -> None:
    values = [value(counters) / counters.forks for counters in costs.values()]
    colours = [_OURS if way == SHARED else _OTHERS for way in costs]
    bars = panel.barh(list(costs), values, _BAR_HEIGHT, color=colours)
    panel.bar_label(bars, [f"{each:.2f}" for each in values], padding=3)
    panel.set_xlim(0, 1.15 * (max(values) or 1.0))


def _measure(settings: ExperimentSettings, start_stage: StartStage) -> dict[str, Any]:
    from cluster.lab.experiments.engine import load_questions, open_engine

    done = start_stage("both methods", 1)
    engine = open_engine(settings, settings.models[0])
    try:
        questions = load_questions(settings, STRUCTURED, engine).questions
        submissions = [
            submission
            for question in questions
            for submission in ReplayedRequest(question.answer, forks=True).start()
        ]
        costs = fork_costs(engine.engine, submissions)
    finally:
        engine.shutdown()
    done()
    return {way: asdict(counters) for way, counters in costs.items()}


def _counters(engine: OfflineEngine, submissions: Sequence[Submission]) -> ForkCounters:
    # Imports vLLM, which takes seconds.
    from apar_core.scheduler.block_sharing import ForkCounters

    sharing: BlockSharing = engine.scheduler.block_sharing
    if not engine.scheduler.reset_prefix_cache():
        raise EngineError("the prefix cache was not reset: blocks of an earlier run are held")
    sharing.counters = ForkCounters()
    prompts = [{"prompt_token_ids": each.prompt_ids} for each in submissions]
    engine.generate(prompts, [each.sampling for each in submissions])
    return sharing.counters
