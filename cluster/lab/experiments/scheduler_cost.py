"""The engine's own CPU time per row in virtual time: vLLM's scheduler, ours, and ours with forks.

Forked threads are shorter than answers, and vLLM itself takes longer per row where sequences start
and end sooner. So vLLM's scheduler also gets each thread as a request of its own.

Each way of scheduling has an engine in its own process, so that none pays for the memory of
another. The processes take turns of a few steps: changes of the machine's speed affect all of them
equally. No model runs, so nothing competes with the measured code. Times are CPU time of the
engine's thread.

CPU time still grows when other programs use the CPU's caches. In virtual time all rounds run the
same steps, so the time of a step is the shortest of the rounds.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count, cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from apar_core.errors import EvaluationError
from apar_core.reporting import Report, ReportTable
from apar_core.tree.threads import thread_prefix, thread_texts
from cluster.lab.experiments.parts import PartStore, StartStage
from cluster.lab.experiments.program import replay_sampling
from cluster.lab.experiments.settings import SchedulerCostSettings
from cluster.lab.grid import worker_pool
from cluster.lab.settings import ModelOnGpu
from cluster.lab.tables import Value, table_of

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.vllm_names import SchedulerOutput
    from cluster.loadtest.replay_answers import ReplayAnswer

Way = Literal["vLLM", "vLLM, a request per thread", "ours, sequential", "ours, forked"]
WAYS: tuple[Way, ...] = ("vLLM", "vLLM, a request per thread", "ours, sequential", "ours, forked")

COST_GOAL = 1.15
"""Goal for the engine core's time per row with forks, relative to vLLM's scheduler."""

_TURN_STEPS = 16


@dataclass(slots=True)
class RunCost:
    """One run: its counts, and the CPU time of its steps.

    rows: sequences scheduled, summed over the steps. tokens: text tokens of all answers.
    step_us: microseconds of each step: schedule, update, output processing. A server processes
        outputs in a different process from the engine core. The first item has the requests that
        clients send, as updates: a fork builds its child in one.
    digest: hash of every step's rows, computed tokens, blocks and block copies.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    forks: int = 0
    preemptions: int = 0
    step_us: list[list[float]] = field(default_factory=list)
    digest: str = ""


@dataclass(frozen=True, slots=True)
class WayCost:
    """The result of one way of scheduling; `run` is its first round.

    schedule_us, update_us: the engine core's scheduler, before and after the model. New requests
        count as updates.
    outputs_us: output processing. All are microseconds per row and step.
    """

    run: RunCost
    schedule_us: float
    update_us: float
    outputs_us: float

    @property
    def core_us(self) -> float:
        """The engine core's microseconds per row and step."""
        return self.schedule_us + self.update_us

    @property
    def core_token_us(self) -> float:
        """The engine core's microseconds per text token."""
        return self.core_us * self.run.rows / self.run.tokens


def way_cost(rounds: Sequence[RunCost]) -> WayCost:
    """Sum up the shortest time of each step. Raises EvaluationError if the steps differ."""
    run = rounds[0]
    if len({each.digest for each in rounds}) > 1:
        raise EvaluationError("the rounds had different steps: their times cannot be compared")
    steps = zip(*(each.step_us for each in rounds), strict=True)
    least = [[min(times) for times in zip(*step, strict=True)] for step in steps]
    schedule_us, update_us, outputs_us = map(sum, zip(*least, strict=True))
    return WayCost(run, schedule_us / run.rows, update_us / run.rows, outputs_us / run.rows)


def report_scheduler_cost(
    settings: SchedulerCostSettings, folder: Path, start_stage: StartStage
) -> Report:
    """Measure the rounds that the folder does not have, and report all of them."""
    store = PartStore(folder, settings.as_text())
    names = [f"round-{number}" for number in range(settings.repeats)]
    done = start_stage("rounds", settings.repeats)
    with ExitStack() as stack:
        pools: dict[Way, ProcessPoolExecutor] = {}
        for name in names:
            if not store.has(name):
                if not pools:
                    pools = {
                        way: stack.enter_context(worker_pool(1, _start, way, settings))
                        for way in WAYS
                    }
                store.add(name, {way: asdict(run) for way, run in _round(pools).items()})
            done()
    costs = {way: way_cost([RunCost(**store.find(name)[way]) for name in names]) for way in WAYS}
    forked_us = costs["ours, forked"].core_us
    ratio = forked_us / costs["vLLM"].core_us
    thread_ratio = forked_us / costs["vLLM, a request per thread"].core_us
    return Report(
        "The engine's own time per row",
        {
            "Engine": f"{settings.model} with the KV cache of an {settings.gpu}, in virtual time; "
            "CPU times are measured on this machine",
            "Load": f"{settings.answers} answers of {settings.trace.name}, at most "
            f"{settings.concurrency} requests at once, {settings.kv_share:g} of the KV cache; "
            f"{'text is streamed' if settings.streams else 'token ids come at the end'}",
            "Engine core with forks over vLLM's": f"{ratio:.3f}x per row "
            f"(goal {COST_GOAL}x: {'met' if ratio <= COST_GOAL else 'missed'})",
            "Engine core with forks over vLLM's with a request per thread": f"{thread_ratio:.3f}x "
            "per row",
        },
        [cost_table(costs, settings.repeats)],
        {},
        {
            way: asdict(cost) | {"run": asdict(replace(cost.run, step_us=[]))}
            for way, cost in costs.items()
        },
    )


def cost_table(costs: Mapping[Way, WayCost], num_rounds: int) -> ReportTable:
    """Return the time per row and step by part, and per text token, for each way of scheduling."""
    vllm_us = costs["vLLM"].core_us
    return table_of(
        "scheduler-cost",
        "CPU microseconds per row and step",
        costs.items(),
        (
            Value("scheduler", "", lambda each: each[0]),
            Value("schedule us", ".2f", lambda each: each[1].schedule_us),
            Value("update us", ".2f", lambda each: each[1].update_us),
            Value("both us", ".2f", lambda each: each[1].core_us),
            Value("x vLLM", ".3f", lambda each: each[1].core_us / vllm_us),
            Value("output processing us", ".2f", lambda each: each[1].outputs_us),
            Value("both us per text token", ".2f", lambda each: each[1].core_token_us),
            Value("rows per step", ".0f", lambda each: each[1].run.rows / each[1].run.steps),
            Value("steps", ".0f", lambda each: each[1].run.steps),
            Value("forks", ".0f", lambda each: each[1].run.forks),
            Value("preemptions", ".0f", lambda each: each[1].run.preemptions),
            Value("hash of steps", "", lambda each: each[1].run.digest[:8]),
        ),
        note=f"The shortest time of each step in {num_rounds} rounds, over whole runs: prompts, "
        "forks and ends are included. A server processes outputs in a different process from the "
        "engine core. Runs with the same hash had the same steps.",
    )


def _round(pools: Mapping[Way, ProcessPoolExecutor]) -> dict[Way, RunCost]:
    """Run each way once, in turns; next is the one that has generated the least text."""
    costs: dict[Way, RunCost] = {}
    progress = dict.fromkeys(pools, 0.0)
    while progress:
        way = min(progress, key=lambda each: progress[each])
        progress[way], cost = pools[way].submit(_run_steps, _TURN_STEPS).result()
        if cost is not None:
            costs[way] = cost
            del progress[way]
    return {way: costs[way] for way in pools}


# ---- in the process of a way --------------------------------------------------------------------


class _Request(NamedTuple):
    """A request to the engine, with the tokens that it generates, by replay key."""

    prompt_ids: Sequence[int]
    scripts: Mapping[str, Sequence[int]]
    max_tokens: int


class _Running(NamedTuple):
    engine: _MeasuredEngine
    folder: TemporaryDirectory[str]


_running: _Running | None = None
"""The engine of this process."""


def _start(way: Way, settings: SchedulerCostSettings) -> None:
    global _running
    folder = TemporaryDirectory(prefix="apar-scheduler-cost-")
    _running = _Running(_MeasuredEngine(way, settings, Path(folder.name)), folder)


def _run_steps(steps: int) -> tuple[float, RunCost | None]:
    """Run steps; return the generated share of the text, and the cost if the run has ended."""
    assert _running is not None
    engine = _running.engine
    cost = next((cost for cost in islice(engine.steps, steps) if cost is not None), None)
    return engine.progress, cost


class _MeasuredEngine:
    """A virtual engine for one way of scheduling, with timers around the parts of its steps."""

    def __init__(self, way: Way, settings: SchedulerCostSettings, folder: Path) -> None:
        engine = _engine(way, settings, folder)
        self._llm_engine: Any = engine.llm.llm_engine
        processor: Any = engine.llm.llm_engine.output_processor
        # As in a server.
        processor.records.keep_trees = False
        self._scheduler: Any = engine.scheduler
        self._forked = way == "ours, forked"
        self._streams = settings.streams
        answers = _answers(settings)
        self._requests = _requests(way, answers)
        self._num_tokens = sum(answer.text_tokens for answer in answers)
        self._cost = RunCost()
        self._num_generated = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._block_names: dict[int, int] = {}
        self.steps = chain.from_iterable(self.run() for _ in count())
        """The steps of run after run, as `run` yields them."""
        self._time_parts()

    @property
    def progress(self) -> float:
        """Share of the text that the run has generated."""
        return self._num_generated / self._num_tokens

    def run(self) -> Iterator[RunCost | None]:
        """Submit all answers, then run a step per item; yield None, and the cost after the last."""
        self._scheduler.reset_prefix_cache()
        self._cost = RunCost(tokens=self._num_tokens, forks=-self._num_forks)
        # What comes before the first step.
        self._cost.step_us.append([0.0, 0.0, 0.0])
        self._num_generated = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._block_names = {}
        for number, request in enumerate(self._requests):
            self._submit(number, request)
        num_left = len(self._requests)
        # As in vLLM's engine core: objects from before a run are exempt from garbage collection.
        gc.collect()
        gc.freeze()
        while True:
            self._cost.step_us.append([0.0, 0.0, 0.0])
            num_left -= sum(output.finished for output in self._llm_engine.step())
            if num_left == 0 and not self._scheduler.requests:
                break
            yield None
        self._cost.forks += self._num_forks
        self._cost.digest = self._digest.hexdigest()
        yield self._cost

    @property
    def _num_forks(self) -> int:
        sharing = getattr(self._scheduler, "block_sharing", None)
        return 0 if sharing is None else int(sharing.counters.forks)

    def _submit(self, number: int, request: _Request) -> None:
        from vllm import SamplingParams

        sampling = replay_sampling(
            request.scripts, max_tokens=request.max_tokens, streams=self._streams
        )
        sampling["extra_args"]["apar_enabled"] = self._forked
        sampling["detokenize"] = self._streams
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        params = SamplingParams(**sampling)
        self._llm_engine.add_request(f"{number}", prompt, params, arrival_time=float(number))

    def _time_parts(self) -> None:
        """Put timers around the scheduler and the output processor."""

        def timed(part: int, call: Callable[..., Any], note: Callable[[Any], None]) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                began_s = time.thread_time()
                result = call(*args, **kwargs)
                self._add_time(part, began_s)
                note(result)
                return result

            return run

        def count_tokens(outputs: Any) -> None:
            self._num_generated += sum(
                len(output.new_token_ids) for each in outputs.values() for output in each.outputs
            )

        scheduler, processor = self._scheduler, self._llm_engine.output_processor
        core = self._llm_engine.engine_core.engine_core
        core.preprocess_add_request = timed(1, core.preprocess_add_request, lambda _: None)
        core.add_request = timed(1, core.add_request, lambda _: None)
        scheduler.schedule = timed(0, scheduler.schedule, self._note)
        scheduler.update_from_output = timed(1, scheduler.update_from_output, count_tokens)
        processor.process_outputs = timed(2, processor.process_outputs, lambda _: None)

    def _add_time(self, part: int, began_s: float) -> None:
        self._cost.step_us[-1][part] += round(1e6 * (time.thread_time() - began_s), 1)

    def _note(self, step: SchedulerOutput) -> None:
        """Count a step, and add it to the digest without its request ids, which are random."""
        if step.total_num_scheduled_tokens == 0:
            return
        cost, cached = self._cost, step.scheduled_cached_reqs
        cost.steps += 1
        cost.rows += len(step.num_scheduled_tokens)
        cost.preemptions += len(step.preempted_req_ids or ())
        new = [
            (len(row.prompt_token_ids or ()), row.num_computed_tokens, self._named(row.block_ids))
            for row in step.scheduled_new_reqs
        ]
        rows = [*step.num_scheduled_tokens.values()], cached.num_computed_tokens
        blocks = [self._named(each) for each in cached.new_block_ids]
        copies = [self._named([each]) for each in step.kv_cache_block_copies or ()]
        self._digest.update(repr((rows, blocks, copies, new)).encode())

    def _named(self, groups: Iterable[Sequence[int]] | None) -> list[list[int]]:
        """Return KV blocks numbered by first use: the order of free blocks differs by round."""
        names = self._block_names
        return [[names.setdefault(each, len(names)) for each in group] for group in groups or ()]


def _engine(way: Way, settings: SchedulerCostSettings, folder: Path) -> OfflineEngine:
    """Return a virtual engine for a way of scheduling."""
    from apar_core.engine.offline_engine import OfflineEngine
    from cluster.lab.virtual.engine import VirtualSpec, engine_arguments, write_model_folder
    from cluster.lab.virtual.executor import AsyncVirtualExecutor, VirtualDevice

    class VllmExecutor(AsyncVirtualExecutor):
        """Leaves vLLM's own scheduler in place."""

        def _init_executor(self) -> None:
            scheduler_cls = self.scheduler_config.scheduler_cls
            super()._init_executor()
            self.scheduler_config.scheduler_cls = scheduler_cls

        def _any_child_left_out(self, *_: Any) -> bool:
            return False

    device = ModelOnGpu(settings.model, settings.gpu)
    spec = VirtualSpec(
        device.size.config,
        device.costs,
        round(settings.kv_share * device.kv_tokens),
        # Without forks and the reserve, which vLLM lacks, both schedulers run the same steps.
        forks={"max_requests": settings.concurrency, "growth_reserve_tokens": 0},
    )
    arguments = engine_arguments(spec, write_model_folder(spec.config, folder, spec.checkpoint))
    arguments["disable_log_stats"] = not settings.streams
    if way.startswith("vLLM"):
        arguments |= {
            "scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
            "distributed_executor_backend": VllmExecutor,
            "max_num_seqs": settings.concurrency,
        }
    engine = OfflineEngine(arguments.pop("model"), **arguments)
    core: Any = engine.llm.llm_engine
    core.engine_core.engine_core.model_executor.attach(VirtualDevice(spec.costs), engine.scheduler)
    return engine


def _requests(way: Way, answers: Sequence[ReplayAnswer]) -> list[_Request]:
    """Return the requests that a way of scheduling gets."""
    if way == "vLLM, a request per thread":
        return _thread_requests(answers)
    forked = way == "ours, forked"
    return [
        _Request(answer.prompt_ids, answer.scripts(forked=forked), answer.max_tokens)
        for answer in answers
    ]


def _thread_requests(answers: Sequence[ReplayAnswer]) -> list[_Request]:
    """Return a request for each thread of all answers, whose prompt is the thread's prefix.

    Parents come before all children, so that a child finds most of its prefix in the cache.
    """
    from cluster.lab.virtual.text import virtual_text

    tokens = virtual_text().tokens
    found: list[tuple[int, _Request]] = []
    for answer in answers:
        texts = thread_texts(answer.tree)
        for name, text in texts.items():
            prefix = thread_prefix(texts, name, answer.prompt_ids, tokens.fork_id, tokens.child_id)
            generated = text.generated(tokens.fork_id, tokens.end_id)
            # Ended by its last token, like a thread, and not by the limit.
            request = _Request(prefix, {"": generated}, len(generated) + 1)
            found.append((name.count("."), request))
    found.sort(key=lambda each: each[0])
    return [request for _, request in found]


def _answers(settings: SchedulerCostSettings) -> list[ReplayAnswer]:
    """Return the answers of the trace, repeated or cut to the number in the settings."""
    from cluster.lab.virtual.text import virtual_text
    from cluster.loadtest.replay_answers import replay_answers
    from cluster.loadtest.trace import read_trace

    text = virtual_text()
    lines = read_trace(settings.trace)
    answers, _ = replay_answers(lines, text, text.tokens, max_tokens=2048)
    return list(islice(cycle(answers), settings.answers))
