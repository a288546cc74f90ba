"""The runs behind figure 5 of the paper: which there are, in which order, and doing them.

All modes at one point come one after the other, so that what changes on the machine meanwhile
meets all of them; rounds go over all points, so that each point is met at several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from apar_core.errors import EvaluationError
from apar_core.workload.replay_answers import ReplayAnswer
from cluster.experiments.cells import Cell, CellKey, CellStore, cell_of
from cluster.experiments.driver import Drive, drive
from cluster.experiments.experiment_engine import LEARNING_ANSWERS, Conditions, ExperimentEngine
from cluster.experiments.program import OneRequest
from cluster.experiments.settings import ExperimentSettings

FIGURE_5A = "fig5a"
FIGURE_5B = "fig5b"
STRUCTURED = "structured"
MIXED = "mixed"

# A closed loop's figures settle with so many answers for each request under way.
_ANSWERS_PER_CLIENT = 4
_LEAST_ANSWERS = 16

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
    """Does the runs that a folder does not have yet."""

    def __init__(
        self,
        engine: ExperimentEngine,
        workloads: Workloads,
        settings: ExperimentSettings,
        store: CellStore,
    ) -> None:
        self._engine = engine
        self._workloads = workloads
        self._settings = settings
        self._store = store

    def warm_up(self) -> None:
        """Answer a few questions, so that no run pays for what the first one sets up."""
        for mode in ("sequential", "eager"):
            number = min(8, len(self._workloads[STRUCTURED]))
            self._drive(Conditions(), STRUCTURED, forks=mode == "eager", number=number)

    def run(self, key: CellKey, on_answer: Callable[[], None]) -> Cell:
        """Do one run and keep it."""
        conditions = self._conditions(key)
        forks = key.mode != "sequential"
        number = num_answers(key, len(self._workloads[key.trace]))
        if conditions.policy == "adaptive":
            # It learns the times of steps where it is measured, as a server has after its start.
            first = min(LEARNING_ANSWERS, number)
            self._drive(conditions, key.trace, forks=forks, number=first)
            conditions = replace(conditions, keeps_learned=True)
        found = self._drive(conditions, key.trace, forks=forks, number=number, on_answer=on_answer)
        cell = cell_of(key, conditions, found, self._settings.max_requests)
        self._store.add(cell)
        return cell

    def _drive(
        self,
        conditions: Conditions,
        trace: str,
        *,
        forks: bool,
        number: int,
        on_answer: Callable[[], None] = lambda: None,
    ) -> Drive:
        answers = self._workloads[trace]
        return drive(
            self._engine,
            conditions,
            lambda index: OneRequest(answers[index], forks=forks),
            number,
            sample_s=self._settings.sample_s,
            on_answer=on_answer,
        )

    def _conditions(self, key: CellKey) -> Conditions:
        token_time_s = 1.0
        if key.mode == "adaptive":
            token_time_s = self._settings.token_time_multiple * self._sequential_step_s(key)
        return Conditions(
            kv_share=key.kv_share,
            # A closed loop keeps to its own number, also where that is larger.
            max_requests=self._settings.max_requests if key.concurrency is None else None,
            concurrency=key.concurrency,
            policy="adaptive" if key.mode == "adaptive" else "eager",
            token_time_s=token_time_s,
        )

    def _sequential_step_s(self, key: CellKey) -> float:
        sequential = self._store.find(key.model_copy(update={"mode": "sequential"}))
        if sequential is None:
            raise EvaluationError(
                "the adaptive policy keeps to a multiple of sequential decoding's step: "
                "let --modes have sequential before adaptive"
            )
        return sequential.step_s


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
