"""Sequential decoding and forks, without and with a reserve for growing threads, in virtual time.

A run's steps depend on the KV memory and not on time: all requests arrive at the start, and no
policy here looks at a clock. So the steps of one run are timed on every GPU of the same memory.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from apar_core.step_costs.costs import StepBatch, StepCosts
from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import find_model
from apar_core.step_costs.predict import kv_tokens, step_costs
from apar_core.virtual.engine import VirtualEngine, VirtualSpec
from apar_core.virtual.executor import StepRecord
from apar_core.virtual.text import FoldedText, virtual_text
from apar_core.workload.replay_answers import ReplayAnswer, replay_answers
from apar_core.workload.trace import read_trace
from cluster.experiments.engine import Conditions, ExperimentEngine
from cluster.experiments.program import OneRequest
from cluster.experiments.samples import Sample, steady

TRACES = Path("../shared/data/traces")
# Limits on concurrent requests: APAR (arXiv 2401.06761), appendix C.2.
CAPS = {"llama-7b": 350, "llama-13b": 180, "llama-3-8b": 350}
SAME_MEMORY = (("a100-80gb", "h100"), ("h200",))
SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
# Whether requests fork, and the reserve in tokens per running thread.
METHODS = {
    "sequential": (False, 0),
    "sequential+reserve": (False, 8),
    "eager": (True, 0),
    "eager+reserve": (True, 8),
}
NUM_REQUESTS = 1000
MAX_TOKENS = 2048
SAMPLE_S = 3.0


@dataclass(frozen=True, slots=True)
class GridRun:
    """One method at one point of the grid; predicted for the GPU.

    sampled: text tokens per second by appendix C.2; of the whole run without enough `samples`.
    """

    model: str
    gpu: str
    share: float
    trace: str
    method: str
    sampled: float
    samples: int
    whole: float
    latency_s: float
    p95_s: float
    steps: int
    rows: float
    largest_rows: int
    computed_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the engine had done after a number of device steps; `pending`: a request waits."""

    steps: int
    text_tokens: int
    pending: bool


class PolicyGrid:
    """An engine in virtual time for all runs of a model."""

    def __init__(self, model: str, *, num_requests: int = NUM_REQUESTS) -> None:
        self.model = find_model(model)
        self.cap = CAPS[self.model.name]
        self.num_requests = num_requests
        largest = find_gpu("h200")
        self._engine = VirtualEngine(
            VirtualSpec(
                self.model.config,
                step_costs(self.model, largest),
                kv_tokens(self.model, largest),
                max_model_len=MAX_TOKENS,
            )
        )
        control = self._engine.control_tokens
        assert control is not None
        hidden = (control.fork_id, control.child_id, self._engine.tokenizer.eos_token_id)
        self._experiment = ExperimentEngine(self._engine, hidden)

    def shutdown(self) -> None:
        """Shut the engine down."""
        self._engine.shutdown()

    def runs(self, gpus: Sequence[str], share: float, trace: str, method: str) -> list[GridRun]:
        """Return one run, timed on GPUs with the same memory."""
        forks, reserve = METHODS[method]
        costs = [step_costs(self.model, find_gpu(gpu)) for gpu in gpus]
        (memory,) = {kv_tokens(self.model, find_gpu(gpu)) for gpu in gpus}
        engine, device = self._experiment, self._engine.device
        answers = list(islice(cycle(_answers(trace)), self.num_requests))
        engine.prepare(
            Conditions(
                num_blocks=round(share * memory) // engine.block_size,
                max_requests=self.cap,
                growth_reserve_tokens=reserve,
            ),
            costs[0],
        )
        records: list[StepRecord] = []
        device.on_step = records.append
        turns, ended = self._drive(answers, records, forks=forks)
        device.on_step = None
        engine.finish()
        totals, preemptions = device.totals, engine.counts.preemptions
        batches = [record.batch for record in records]
        found = []
        for gpu, each in zip(gpus, costs, strict=True):
            times = [0.0, *_step_ends(batches, each)]
            wall_s, text_tokens = times[ended[-1][0]], sum(tokens for _, tokens in ended)
            kept = steady(list(_samples(turns, times)))
            latencies = sorted(times[steps] for steps, _ in ended)
            found.append(
                GridRun(
                    model=self.model.name,
                    gpu=gpu,
                    share=share,
                    trace=trace,
                    method=method,
                    sampled=statistics.fmean(sample.tokens_per_s for sample in kept)
                    if kept
                    else text_tokens / wall_s,
                    samples=len(kept),
                    whole=text_tokens / wall_s,
                    latency_s=statistics.fmean(latencies),
                    p95_s=latencies[int(0.95 * len(latencies))],
                    steps=totals.steps,
                    rows=totals.rows / totals.steps,
                    largest_rows=totals.largest_rows,
                    computed_tokens=totals.computed_tokens,
                    preemptions=preemptions,
                )
            )
        return found

    def _drive(
        self, answers: Sequence[ReplayAnswer], records: Sequence[StepRecord], *, forks: bool
    ) -> tuple[list[_Turn], list[tuple[int, int]]]:
        """Answer everything; return the turns, and (steps, text tokens) of each ended request."""
        engine = self._experiment
        for number, answer in enumerate(answers):
            (submission,) = OneRequest(answer, forks=forks).start()
            engine.submit(str(number), submission)
        ends: list[float] = []
        turns: list[_Turn] = []
        ended: list[tuple[int, int]] = []
        pending = True
        while len(ended) < len(answers):
            outputs: list[Any] = engine.llm_engine.step()
            ends.extend(record.end_s for record in records[len(ends) :])
            steps = bisect_right(ends, engine.clock() + 1e-9)
            # A request that waits once all have passed the gate is looked for one by one.
            pending = pending and (
                engine.scheduler.gate.num_held > 0 or bool(engine.waiting_requests())
            )
            turns.append(_Turn(steps, engine.counts.text_tokens, pending))
            ended += [
                (steps, answers[int(output.request_id)].text_tokens)
                for output in outputs
                if output.finished
            ]
        return turns, ended


@cache
def _text() -> FoldedText:
    return virtual_text()


@cache
def _answers(trace: str) -> list[ReplayAnswer]:
    text, path = _text(), TRACES / f"{trace}.jsonl"
    return replay_answers(read_trace(path), text, text.tokens, max_tokens=MAX_TOKENS)[0]


def _step_ends(batches: Sequence[StepBatch], costs: StepCosts) -> list[float]:
    """Return when each step ends on a device, with scheduling one step ahead."""
    now_s = free_s = 0.0
    ends: list[float] = []
    for number, batch in enumerate(batches):
        if number >= 2:
            now_s = max(now_s, ends[number - 2])
        now_s += costs.host_s(batch.rows)
        free_s = max(now_s, free_s) + costs.device_s(batch)
        ends.append(free_s)
    return ends


def _samples(turns: Sequence[_Turn], times: Sequence[float]) -> Iterator[Sample]:
    opened_s, before = 0.0, 0
    for turn in turns:
        now_s = times[turn.steps]
        if now_s - opened_s >= SAMPLE_S:
            tokens_per_s = (turn.text_tokens - before) / (now_s - opened_s)
            yield Sample(now_s, tokens_per_s, 0.0, 0.0, turn.pending)
            opened_s, before = now_s, turn.text_tokens


def ratios(runs: Sequence[GridRun]) -> str:
    """Return a Markdown table: each method over sequential decoding, cells as in the heading."""
    methods = [name for name in METHODS if name != "sequential"]
    lines = [
        "| model | predicted for | share | trace | " + " | ".join(methods) + " |",
        "|---" * (4 + len(methods)) + "|",
    ]
    by_key = {(run.model, run.gpu, run.share, run.trace, run.method): run for run in runs}
    for run in sorted(runs, key=lambda run: (run.model, run.gpu, run.share, run.trace)):
        if run.method != "sequential":
            continue
        point = (run.model, run.gpu, run.share, run.trace)
        cells = []
        for method in methods:
            other = by_key.get((*point, method))
            cells.append("" if other is None else _ratio_cell(other, run))
        lines.append(f"| {' | '.join(map(str, point))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio_cell(run: GridRun, base: GridRun) -> str:
    # One of the two may have no steady samples; whole runs are then compared.
    comparable = run.samples > 0 and base.samples > 0
    sampled = f"{run.sampled / base.sampled:.2f}" if comparable else "-"
    return f"{sampled} / {run.whole / base.whole:.2f} / {run.latency_s / base.latency_s:.2f}"
