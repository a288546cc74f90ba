"""No forks, eager forks and adaptive forks under rising load, in turn in one engine.

The same answers (recorded from the model, replayed token by token) arrive at random times. What
the adaptive policy promises is the time per token of what runs; what it costs is waiting forks.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.scheduler.fork_admission import AdmissionCounters
from apar_core.scheduler.fork_policy import AdaptivePolicy, EagerPolicy
from apar_core.scheduler.step_time import StepClock, StepTimeModel
from benchmarks.decoding import ForkedAnswer, forked_answers, replays

Mode = Literal["none", "eager", "adaptive"]
MODES: tuple[Mode, ...] = ("none", "eager", "adaptive")
NUM_ANSWERS = 32
LOADS = (0.4, 0.8, 1.2, 1.6)
"""Requests a second as shares of what the engine finishes unforked when all come at once."""


@dataclass
class ThreadTimes:
    """When a thread's first and last token came, in seconds, and how many came."""

    first_s: float
    last_s: float
    num_tokens: int = 0


@dataclass(frozen=True)
class Served:
    """One request: from its arrival to its end, and the mean time between tokens of its threads."""

    latency_s: float
    first_token_s: float
    token_time_s: float
    text_tokens: int


@dataclass
class Run:
    """All requests of one mode at one load, of all rounds together."""

    load: float
    mode: Mode
    served: list[Served] = field(default_factory=list)
    wall_s: float = 0.0
    delayed: int = 0
    forks: int = 0

    def row(self, slo_s: float) -> dict[str, float]:
        """What the table shows; milliseconds per token, seconds of latency, rates per second."""
        token_times = sorted(each.token_time_s for each in self.served)
        latencies = sorted(each.latency_s for each in self.served)
        within = [each for each in self.served if each.token_time_s <= slo_s]
        return {
            "token ms p50": 1000 * statistics.median(token_times),
            "token ms p95": 1000 * _quantile(token_times, 0.95),
            "latency s p50": statistics.median(latencies),
            "latency s p95": _quantile(latencies, 0.95),
            "first token s p95": _quantile(sorted(e.first_token_s for e in self.served), 0.95),
            "text tokens/s": sum(each.text_tokens for each in self.served) / self.wall_s,
            "within SLO %": 100 * len(within) / len(self.served),
            "goodput tokens/s": sum(each.text_tokens for each in within) / self.wall_s,
            "forks delayed %": 100 * self.delayed / max(self.forks, 1),
        }


def run(
    engine: OfflineEngine,
    console: Console,
    *,
    requests: int,
    rounds: int,
    slo_multiple: float,
    target: float,
    cpu_time: bool,
) -> dict[str, Any]:
    """Print the table; returns its rows as plain values.

    The adaptive policy keeps to `target` times the SLO: a fork that has started is not taken back
    when requests come that make the step longer.
    """
    answers = forked_answers(engine, NUM_ANSWERS)
    bench = _Benchmark(engine, answers, _Clock(cpu_time=cpu_time))
    bench.serve("none", [0.0] * NUM_ANSWERS)  # warms up
    # The best of several, which other work on the machine has disturbed least.
    alone_s = min(bench.serve("none", [0.0])[0][0].token_time_s for _ in range(9))
    slo_s = slo_multiple * alone_s
    at_once = [0.0] * (2 * NUM_ANSWERS)
    capacity = len(at_once) / min(bench.serve("none", at_once)[1] for _ in range(3))
    bench.policy = AdaptivePolicy(target * slo_s, StepTimeModel())
    bench.serve("adaptive", _arrivals(random.Random(0), capacity, NUM_ANSWERS))  # learns
    runs = {(load, mode): Run(load, mode) for load in LOADS for mode in MODES}
    for number in range(rounds):
        for load in LOADS:
            arrivals = _arrivals(random.Random(number + 1), load * capacity, requests)
            for mode in MODES:
                bench.add_to(runs[load, mode], arrivals)
    console.print(_table(list(runs.values()), slo_s, alone_s, capacity))
    coefficients = asdict(bench.policy.model.coefficients)
    console.print({name: f"{1e6 * value:.1f} us" for name, value in coefficients.items()})
    return {
        "slo_s": slo_s,
        "alone_s": alone_s,
        "capacity_per_s": capacity,
        "step_time_model": coefficients,
        "runs": [{"load": r.load, "mode": r.mode} | r.row(slo_s) for r in runs.values()],
    }


class _Clock:
    """The time of the wall, or the CPU time of this process with its waiting added.

    CPU time keeps other work on the machine out of the figures; the model must run on one executor.
    """

    def __init__(self, *, cpu_time: bool) -> None:
        self._cpu_time = cpu_time
        self._waited_s = 0.0

    def now_s(self) -> float:
        """Seconds since some moment."""
        return time.process_time() + self._waited_s if self._cpu_time else time.perf_counter()

    def wait_until(self, moment_s: float) -> None:
        """Let nothing happen until then."""
        left_s = max(moment_s - self.now_s(), 0.0)
        if self._cpu_time:
            self._waited_s += left_s
        else:
            time.sleep(left_s)


class _Benchmark:
    """Serves replayed answers in one engine, one mode after the other."""

    def __init__(
        self, engine: OfflineEngine, answers: Sequence[ForkedAnswer], clock: _Clock
    ) -> None:
        engine.scheduler.step_clock = StepClock(clock.now_s)
        self.policy = AdaptivePolicy(1.0)
        self._clock = clock
        self._engine = engine
        self._answers = answers
        self._number = 0

    def add_to(self, run: Run, arrivals: Sequence[float]) -> None:
        """Serve the arrivals in the run's mode, and add what was measured."""
        admission = self._engine.scheduler.admission
        admission.counters = AdmissionCounters()
        served, wall_s = self.serve(run.mode, arrivals)
        run.served += served
        run.wall_s += wall_s
        run.delayed += sum(admission.counters.delayed.values())
        run.forks += run.delayed + admission.counters.accepted

    def serve(self, mode: Mode, arrivals: Sequence[float]) -> tuple[list[Served], float]:
        """Requests that arrive so many seconds from now; waits until all have ended."""
        self._engine.scheduler.reset_prefix_cache()
        # All modes teach the model, as any traffic would; only one heeds it.
        policy = self.policy if mode == "adaptive" else _Taught(self.policy.model)
        self._engine.scheduler.admission.policy = policy
        prompts, sampling = replays(self._answers, as_threads=mode != "none")
        llm_engine: Any = self._engine.llm.llm_engine
        waiting = [(arrival, index % len(prompts)) for index, arrival in enumerate(arrivals)]
        waiting.reverse()
        came: dict[str, tuple[float, int]] = {}
        ended: dict[str, float] = {}
        now_s = self._clock.now_s
        with _thread_times(self._engine, now_s) as threads:
            start = now_s()
            while waiting or llm_engine.has_unfinished_requests():
                while waiting and waiting[-1][0] <= now_s() - start:
                    arrival, index = waiting.pop()
                    name = self._add(llm_engine, prompts[index], sampling[index])
                    came[name] = (start + arrival, index)
                if not llm_engine.has_unfinished_requests():
                    self._clock.wait_until(start + waiting[-1][0])
                    continue
                for output in llm_engine.step():
                    if output.finished:
                        ended[output.request_id] = now_s()
            wall_s = now_s() - start
        texts = [len(answer.text) - 1 for answer in self._answers]
        return [
            _served(threads, name, at, ended[name], texts[index])
            for name, (at, index) in came.items()
        ], wall_s

    def _add(self, llm_engine: Any, prompt: dict[str, Any], sampling: dict[str, Any]) -> str:
        from vllm import SamplingParams

        self._number += 1
        name = f"policy-{self._number}."
        llm_engine.add_request(name, prompt, SamplingParams(**sampling))
        return name


class _Taught(EagerPolicy):
    """Eager, and teaches a model all the same."""

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model

    def observe(self, batch: Any, seconds: float) -> None:
        """Teach the model a step."""
        self._model.observe(batch, seconds)


@contextmanager
def _thread_times(
    engine: OfflineEngine, now_s: Callable[[], float]
) -> Iterator[dict[str, ThreadTimes]]:
    """Times of the tokens of each thread, by its engine request id, while the context lasts."""
    scheduler = engine.scheduler
    original, learns = scheduler.update_from_output, scheduler._learns
    scheduler._learns = True  # in every mode, so that each pays for it
    times: dict[str, ThreadTimes] = {}

    def update_from_output(*args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        now = now_s()
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                if output.new_token_ids:
                    thread = times.setdefault(output.request_id, ThreadTimes(now, now))
                    thread.last_s = now
                    thread.num_tokens += len(output.new_token_ids)
        return outputs

    scheduler.update_from_output = update_from_output
    try:
        yield times
    finally:
        scheduler.update_from_output = original
        scheduler._learns = learns


def _served(
    threads: dict[str, ThreadTimes], name: str, came_s: float, ended_s: float, text_tokens: int
) -> Served:
    """Sum up a request; vLLM appends a random part to the names of requests."""
    own = [times for thread_id, times in threads.items() if thread_id.startswith(name)]
    intervals = sum(each.num_tokens - 1 for each in own)
    return Served(
        latency_s=ended_s - came_s,
        first_token_s=min(each.first_s for each in own) - came_s,
        token_time_s=sum(each.last_s - each.first_s for each in own) / max(intervals, 1),
        text_tokens=text_tokens,
    )


def _arrivals(numbers: random.Random, rate: float, number: int) -> list[float]:
    """Seconds of a Poisson process with so many arrivals a second."""
    now, arrivals = 0.0, []
    for _ in range(number):
        now += numbers.expovariate(rate)
        arrivals.append(now)
    return arrivals


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _table(runs: Sequence[Run], slo_s: float, alone_s: float, capacity: float) -> Table:
    title = (
        f"Fork policies; SLO {1000 * slo_s:.1f} ms per token "
        f"({1000 * alone_s:.1f} alone), load 1.0 = {capacity:.1f} requests/s"
    )
    table = Table(title=title)
    for name in ("load", "forks", *runs[0].row(slo_s)):
        table.add_column(name, justify="left" if name == "forks" else "right")
    for each in runs:
        values = [f"{value:.3g}" for value in each.row(slo_s).values()]
        table.add_row(f"{each.load:.1f}", each.mode, *values)
    return table
