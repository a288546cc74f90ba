"""Puts programs through engines in this process, and measures what becomes of them.

Runs that are to be compared are done side by side, each in an engine of its own, in turns of a few
steps: a machine whose speed changes from minute to minute is then the same to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, cycle, islice
from typing import TYPE_CHECKING, Any

from apar_core.errors import EvaluationError
from cluster.experiments.experiment_engine import Conditions, ExperimentEngine, StepCounts
from cluster.experiments.program import Program, Submission
from cluster.experiments.samples import Sample, Sampler

if TYPE_CHECKING:
    from apar_core.tree.statistics import TreeStatistics

_TURN_STEPS = 16

ProgramFactory = Callable[[int], Program]
"""Makes the program of the question at an index, anew for each run."""


@dataclass(frozen=True, slots=True)
class Served:
    """One question of a run, from when it came to the end of its answer.

    `latency_s` counts from its arrival. `statistics` are its tree's where it was one request.
    """

    answer_id: str
    category: str
    text_tokens: int
    latency_s: float
    statistics: TreeStatistics | None


@dataclass(frozen=True, slots=True)
class Drive:
    """A run. `wall_s`, `counts` and `whole` are of all of it, warm-up and fillers included."""

    wall_s: float
    served: tuple[Served, ...]
    samples: tuple[Sample, ...]
    whole: Sample
    counts: StepCounts
    kv_tokens: int
    forks: int
    forks_delayed: int


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run to be done: which questions are put to which engine, and under which conditions."""

    engine: ExperimentEngine
    conditions: Conditions
    make: ProgramFactory
    num_questions: int
    on_answer: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Client:
    """A program on its way; `alive` are the names of its submissions that run."""

    program: Program
    is_measured: bool
    came_s: float
    alive: set[str] = field(default_factory=set)
    statistics: TreeStatistics | None = None


def drive(plan: RunPlan, *, sample_s: float) -> Drive:
    """Answer every question once, and return what was measured.

    In a closed loop others of the questions keep the engine busy before and after the measured
    ones, which so all see the same concurrency. Raises EvaluationError if an answer is not the one
    that was to be generated.
    """
    return drive_side_by_side([plan], sample_s=sample_s)[0]


def drive_side_by_side(plans: Sequence[RunPlan], *, sample_s: float) -> list[Drive]:
    """Do runs in engines of their own, so that all of them begin and end at about the same time.

    The next steps are those of the run of whose text the least is generated; a run's times are
    those of its own steps. Raises EvaluationError as `drive` does.
    """
    clocks = [plan.engine.clock for plan in plans]
    try:
        for clock in clocks:
            clock.pause()
        runs = [_Run(plan, sample_s) for plan in plans]
        while unfinished := [run for run in runs if not run.is_finished]:
            min(unfinished, key=lambda run: run.progress).take_turn(_TURN_STEPS)
        return [run.result() for run in runs]
    finally:
        for clock in clocks:
            clock.resume()


class _Run:
    """The state of one run; its time passes in its turns."""

    def __init__(self, plan: RunPlan, sample_s: float) -> None:
        engine = plan.engine
        engine.prepare(plan.conditions)
        self.served: list[Served] = []
        self.num_left = plan.num_questions
        self._plan = plan
        self._engine = engine
        self._concurrency = plan.conditions.concurrency
        self._is_endless = self._concurrency is not None and plan.conditions.keeps_busy
        self._num_coming = plan.num_questions
        self._text_tokens = sum(
            plan.make(index).answer.text_tokens for index in range(plan.num_questions)
        )
        fillers = self._concurrency if self._is_endless else None
        self._coming = question_order(plan.num_questions, fillers)
        self._num_clients = 0
        self._names = count()
        # By the engine's external request id.
        self._clients: dict[str, tuple[_Client, str]] = {}
        # Those of them that a question began with.
        self._first: set[str] = set()
        self._start_s = engine.clock()
        self._sampler = Sampler(sample_s, engine.clock, lambda: self.has_pending)

    @property
    def is_finished(self) -> bool:
        """Whether all measured answers are there."""
        return self.num_left == 0

    @property
    def progress(self) -> float:
        """The part of the text that is generated; beyond 1 with what keeps a closed loop busy."""
        return float(self._engine.counts.text_tokens / self._text_tokens)

    def take_turn(self, steps: int) -> None:
        """Go on for so many steps or to the end."""
        self._engine.clock.resume()
        for _ in range(steps):
            self.submit_what_may_come()
            self.step()
            if self.is_finished:
                break
        self._engine.clock.pause()

    def result(self) -> Drive:
        """What was measured; whatever still keeps the engine busy is ended."""
        engine = self._engine
        wall_s, whole = engine.clock() - self._start_s, self._sampler.whole()
        engine.abort_all()
        counters = engine.scheduler.admission.counters
        delayed = sum(counters.delayed.values())
        return Drive(
            wall_s=wall_s,
            served=tuple(self.served),
            samples=tuple(self._sampler.samples),
            whole=whole,
            counts=engine.counts,
            kv_tokens=round(self._plan.conditions.kv_share * engine.num_blocks) * engine.block_size,
            forks=counters.accepted + delayed,
            forks_delayed=delayed,
        )

    @property
    def has_pending(self) -> bool:
        """Whether a question waits that has not begun, outside the engine or in it.

        What a question submits later is none, however it is answered: so all ways of answering are
        measured over the same part of a run.
        """
        if self._is_endless or self._num_coming > 0:
            return True
        return not self._first.isdisjoint(self._engine.waiting_requests())

    def submit_what_may_come(self) -> None:
        """Let questions arrive: all at once, or as many as the closed loop keeps under way."""
        room = None if self._concurrency is None else self._concurrency - self._num_clients
        for index, is_measured in islice(self._coming, room):
            client = _Client(self._plan.make(index), is_measured, self._engine.clock())
            self._num_clients += 1
            self._num_coming -= is_measured
            self._first.update(self._submit(client, client.program.start()))

    def step(self) -> None:
        """One step of the engine, and what its outputs make the programs do."""
        engine = self._engine
        counts = engine.counts
        before = (counts.text_tokens, counts.rows)
        outputs = engine.llm_engine.step()
        self._sampler.add_step(
            tokens=counts.text_tokens - before[0],
            kv_tokens=engine.kv_tokens_in_use,
            rows=counts.rows - before[1],
        )
        for output in outputs:
            self._take(output)

    def _submit(self, client: _Client, submissions: Iterable[Submission]) -> list[str]:
        from vllm import SamplingParams

        request_ids = []
        for submission in submissions:
            request_id = f"run-{next(self._names)}"
            request_ids.append(request_id)
            client.alive.add(submission.name)
            self._clients[request_id] = (client, submission.name)
            self._engine.llm_engine.add_request(
                request_id,
                {"prompt_token_ids": submission.prompt_ids},
                SamplingParams(**submission.sampling),
            )
        return request_ids

    def _take(self, output: Any) -> None:
        client, name = self._clients[output.request_id]
        token_ids = output.outputs[0].token_ids
        self._submit(client, client.program.on_tokens(name, token_ids))
        if not output.finished:
            return
        del self._clients[output.request_id]
        record = self._engine.llm_engine.output_processor.records.take(output.request_id)
        client.statistics = None if record is None else record.statistics
        client.alive.discard(name)
        self._submit(client, client.program.on_end(name))
        if not client.alive:
            self._end(client)

    def _end(self, client: _Client) -> None:
        self._num_clients -= 1
        answer = client.program.answer
        if client.program.text_ids() != answer.flat:
            raise EvaluationError(
                f"the engine generated another answer than {answer.answer_id!r} of the trace"
            )
        if not client.is_measured:
            return
        self.num_left -= 1
        self._plan.on_answer()
        self.served.append(
            Served(
                answer_id=answer.answer_id,
                category=answer.category,
                text_tokens=answer.text_tokens,
                latency_s=self._engine.clock() - client.came_s,
                statistics=client.statistics,
            )
        )


def question_order(number: int, concurrency: int | None) -> Iterator[tuple[int, bool]]:
    """Return the indices of questions as they come, and whether each is measured."""
    measured = ((index, True) for index in range(number))
    if concurrency is None:
        return measured
    fillers = range(number)
    # The last questions warm up, so that the measured ones do not come twice in a row.
    first = ((index, False) for index in islice(cycle(reversed(fillers)), concurrency))
    return chain(first, measured, ((index, False) for index in cycle(fillers)))
