"""The runs behind figure 5 of the paper: which there are, in which order, and doing them.

All modes at one point are run side by side, or one after the other where there is one engine, so
that what changes on the machine meanwhile meets all of them; rounds go over all points, so that
each point is met at several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle

from apar_core.workload.replay_answers import ReplayAnswer
from cluster.experiments.cells import Cell, CellKey, CellStore, cell_of
from cluster.experiments.driver import Drive, RunPlan, drive_side_by_side
from cluster.experiments.experiment_engine import Conditions, ExperimentEngine
from cluster.experiments.program import OneRequest
from cluster.experiments.settings import ExperimentSettings, Mode
from cluster.experiments.side_by_side import plans_of, unfinished_groups, with_learned_steps

FIGURE_5A = "fig5a"
FIGURE_5B = "fig5b"
STRUCTURED = "structured"
MIXED = "mixed"

# A closed loop's figures settle with so many answers for each request under way.
_ANSWERS_PER_CLIENT = 4
_LEAST_ANSWERS = 16
_WARM_UP_ANSWERS = 4

Workloads = Mapping[str, Sequence[ReplayAnswer]]
"""Answers by the name of their trace."""


def keys_of(figure: str, settings: ExperimentSettings, traces: Sequence[str]) -> list[CellKey]:
    """Return the runs of a figure round by round, those of one point together."""
    points = _points_5a if figure == FIGURE_5A else _points_5b
    return [
        CellKey(
            figure=figure,
            trace=trace,
            mode=mode,
            kv_share=share,
            concurrency=concurrency,
            round=number,
        )
        for number in range(settings.rounds)
        for trace, share, concurrency in points(settings)
        if trace in traces
        for mode in settings.modes
    ]


def num_answers(key: CellKey, available: int) -> int:
    """Return how many answers a run measures; a closed loop of few clients would take long."""
    if key.concurrency is None:
        return available
    return min(available, max(_LEAST_ANSWERS, _ANSWERS_PER_CLIENT * key.concurrency))


class Runner:
    """Does the runs that a folder does not have yet, side by side in as many engines as there are.

    With a single engine they follow each other.
    """

    def __init__(
        self,
        engines: Sequence[ExperimentEngine],
        workloads: Workloads,
        settings: ExperimentSettings,
        store: CellStore,
    ) -> None:
        self._engines = engines
        self._workloads = workloads
        self._settings = settings
        self._store = store

    def warm_up(self) -> None:
        """Answer a few questions, so that no run pays for what the first one sets up."""
        number = min(_WARM_UP_ANSWERS, len(self._workloads[STRUCTURED]))
        for mode, engine in zip(self._settings.modes, cycle(self._engines), strict=False):
            self._drive([self._plan(engine, Conditions(), STRUCTURED, mode, number)])

    def groups(self, keys: Sequence[CellKey]) -> Iterator[tuple[CellKey, ...]]:
        """Return the groups that are run side by side, each of one point, and are not all done."""
        return unfinished_groups(
            keys,
            len(self._engines),
            lambda key: key.sequential,
            lambda key: self._store.find(key) is not None,
        )

    def run(self, keys: Sequence[CellKey], on_answer: Callable[[], None]) -> list[Cell]:
        """Do the runs of a group and keep them."""
        plans = plans_of(keys, self._engines, self._plan_of, on_answer)
        cells = [
            cell_of(key, plan.conditions, found, self._settings.max_requests)
            for key, plan, found in zip(keys, plans, self._drive(plans), strict=True)
        ]
        for cell in cells:
            self._store.add(cell)
        return cells

    def _drive(self, plans: Sequence[RunPlan]) -> list[Drive]:
        return drive_side_by_side(plans, sample_s=self._settings.sample_s)

    def _plan_of(self, key: CellKey, engine: ExperimentEngine) -> RunPlan:
        number = num_answers(key, len(self._workloads[key.trace]))
        conditions = Conditions(
            kv_share=key.kv_share,
            # A closed loop keeps to its own number, also where that is larger.
            max_requests=self._settings.max_requests if key.concurrency is None else None,
            concurrency=key.concurrency,
            policy="adaptive" if key.mode == "adaptive" else "eager",
        )
        plan = self._plan(engine, conditions, key.trace, key.mode, number)
        if key.mode != "adaptive":
            return plan
        sequential = self._store.find(key.sequential)
        return with_learned_steps(
            plan,
            self._plan(engine, conditions, key.trace, "sequential", number),
            self._settings,
            step_s=None if sequential is None else sequential.step_s,
        )

    def _plan(
        self,
        engine: ExperimentEngine,
        conditions: Conditions,
        trace: str,
        mode: Mode,
        number: int,
    ) -> RunPlan:
        answers = self._workloads[trace]
        forks = mode != "sequential"
        return RunPlan(
            engine, conditions, lambda index: OneRequest(answers[index], forks=forks), number
        )


def _points_5a(settings: ExperimentSettings) -> Iterator[tuple[str, float, int | None]]:
    for share in settings.kv_shares:
        yield STRUCTURED, share, None
    for share in settings.mixed_kv_shares:
        yield MIXED, share, None


def _points_5b(settings: ExperimentSettings) -> Iterator[tuple[str, float, int | None]]:
    # The most memory that figure 5a has.
    share = max(settings.kv_shares)
    for concurrency in settings.concurrencies:
        yield STRUCTURED, share, concurrency
