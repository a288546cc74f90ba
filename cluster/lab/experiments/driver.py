"""Run requests in process, and record latency and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain, count, cycle, islice
from typing import TYPE_CHECKING, Any

from apar_core.errors import EvaluationError
from cluster.lab.experiments.engine import ExperimentEngine, RunConditions, StepCounts
from cluster.lab.experiments.program import Program, Submission
from cluster.lab.experiments.samples import Sample, Sampler

if TYPE_CHECKING:
    from apar_core.step_costs.costs import StepCosts
    from apar_core.tree.statistics import TreeStatistics
    from cluster.lab.virtual.executor import StepTotals

ProgramFactory = Callable[[int], Program]
"""Creates a new program for the question at an index."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run: its questions, conditions and load.

    clients: maximum number of questions in flight, for closed loops and for methods whose requests
        the engine cannot limit; None: all questions are submitted at the start.
    is_closed_loop: each answer is followed by the next question, whose latency counts from then.
    has_fillers: in a closed loop, unmeasured questions run before and after the measured ones, so
        that all of these see the same concurrency.
    costs: replace those of a virtual engine.
    """

    conditions: RunConditions
    make: ProgramFactory
    num_questions: int
    clients: int | None = None
    is_closed_loop: bool = False
    has_fillers: bool = True
    costs: StepCosts | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """One answered question of a run.

    arrival_s: on the run's clock. Except in a closed loop, all questions arrive at the start.
    latency_s: from arrival, time in the queue included.
    statistics: statistics of its tree, if the question is one request.
    """

    answer_id: str
    category: str
    text_tokens: int
    arrival_s: float
    latency_s: float
    statistics: TreeStatistics | None


@dataclass(frozen=True, slots=True)
class Drive:
    """Measurements of a run. All but `served` include warm-up and fillers of a closed loop."""

    duration_s: float
    served: tuple[Served, ...]
    samples: tuple[Sample, ...]
    whole: Sample
    counts: StepCounts
    sequences: int
    prompt_tokens: int
    forks: int
    forks_delayed: int
    totals: StepTotals | None


@dataclass(slots=True)
class _Client:
    """A question that is being answered; `alive` are the names of its running submissions."""

    program: Program
    is_measured: bool
    arrival_s: float
    alive: set[str] = field(default_factory=set)
    statistics: TreeStatistics | None = None


def drive(engine: ExperimentEngine, plan: RunPlan, *, sample_s: float) -> Drive:
    """Answer every question once, and return the measurements.

    Raises EvaluationError if an answer differs from the recorded one.
    """
    run = _Run(engine, plan, sample_s)
    while run.num_left:
        run.submit()
        run.step()
    return run.result()


class _Run:
    """The state of one run."""

    def __init__(self, engine: ExperimentEngine, plan: RunPlan, sample_s: float) -> None:
        engine.prepare(plan.conditions, plan.costs)
        self.num_left = plan.num_questions
        self._plan = plan
        self._engine = engine
        self._clock = engine.clock
        self._served: list[Served] = []
        self._num_coming = plan.num_questions
        fillers = plan.clients if plan.is_closed_loop and plan.has_fillers else None
        self._coming = question_order(plan.num_questions, fillers)
        self._num_clients = 0
        self._names = count()
        # By external request id.
        self._clients: dict[str, tuple[_Client, str]] = {}
        # Ids of each question's first requests.
        self._first: set[str] = set()
        # Heap by the time at which they reach the engine.
        self._delayed: list[tuple[float, int, str, Submission]] = []
        self._start_s = self._clock()
        self._sampler = Sampler(sample_s, self._clock, self._has_pending, self._num_running)

    def submit(self) -> None:
        """Submit questions up to the clients' limit."""
        plan = self._plan
        room = None if plan.clients is None else plan.clients - self._num_clients
        for index, is_measured in islice(self._coming, room):
            arrival_s = self._clock() if plan.is_closed_loop else self._start_s
            client = _Client(plan.make(index), is_measured, arrival_s)
            self._num_clients += 1
            self._num_coming -= is_measured
            self._first.update(self._submit(client, client.program.start()))

    def step(self) -> None:
        """Run one step of the engine, and let the programs act on its outputs."""
        engine = self._engine
        self._deliver()
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

    def result(self) -> Drive:
        """Return the measurements, and abort remaining requests."""
        engine = self._engine
        counters = engine.scheduler.admission.counters
        delayed = sum(counters.delayed.values())
        # Copies, because the steps that end the run do not count.
        drive = Drive(
            duration_s=self._clock() - self._start_s,
            served=tuple(self._served),
            samples=tuple(self._sampler.samples),
            whole=self._sampler.whole(),
            counts=replace(engine.counts),
            sequences=engine.num_sequences,
            prompt_tokens=engine.prompt_tokens,
            forks=counters.accepted + delayed,
            forks_delayed=delayed,
            totals=None if engine.device is None else replace(engine.device.totals),
        )
        engine.finish()
        return drive

    def _has_pending(self) -> bool:
        """Return whether a question that has not started is waiting, in the engine or outside.

        Later submissions of a question do not count, so that all methods are measured over the
        same part of a run.
        """
        if self._plan.is_closed_loop or self._num_coming > 0:
            return True
        return not self._first.isdisjoint(self._engine.waiting_requests())

    def _num_running(self) -> int:
        """Return the number of questions in the engine that have started."""
        return self._num_clients - len(self._first & self._engine.waiting_requests())

    def _submit(self, client: _Client, submissions: Iterable[Submission]) -> list[str]:
        request_ids = []
        for submission in submissions:
            request_id = f"run-{next(self._names)}"
            request_ids.append(request_id)
            client.alive.add(submission.name)
            self._clients[request_id] = (client, submission.name)
            if submission.delay_s:
                at_s = self._clock() + submission.delay_s
                heappush(self._delayed, (at_s, next(self._names), request_id, submission))
            else:
                self._engine.submit(request_id, submission)
        return request_ids

    def _deliver(self) -> None:
        """Submit the delayed requests that are due; advance the clock if the engine is idle."""
        if self._delayed and not self._engine.llm_engine.has_unfinished_requests():
            assert self._engine.device is not None, "only a virtual clock can be advanced"
            self._engine.device.clock.advance_to(self._delayed[0][0])
        while self._delayed and self._delayed[0][0] <= self._clock():
            _, _, request_id, submission = heappop(self._delayed)
            self._engine.submit(request_id, submission)

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
        self._served.append(
            Served(
                answer_id=answer.answer_id,
                category=answer.category,
                text_tokens=answer.text_tokens,
                arrival_s=client.arrival_s,
                latency_s=self._clock() - client.arrival_s,
                statistics=client.statistics,
            )
        )


def question_order(number: int, concurrency: int | None) -> Iterator[tuple[int, bool]]:
    """Return (index, is measured) of the questions in order.

    With a concurrency, unmeasured questions come before and after the measured ones.
    """
    measured = ((index, True) for index in range(number))
    if concurrency is None:
        return measured
    fillers = range(number)
    # Warm up with the last questions, so that no measured one soon comes a second time.
    first = ((index, False) for index in islice(cycle(reversed(fillers)), concurrency))
    return chain(first, measured, ((index, False) for index in cycle(fillers)))
