"""Functions that tests of the driver run in an engine's process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.replay import REPLAY, replay_args
from apar_core.workload.replay_answers import ReplayAnswer, replay_answers
from apar_core.workload.trace import TraceLine
from cluster.experiments.driver import Drive, RunPlan, drive, drive_side_by_side
from cluster.experiments.experiment_engine import Conditions, ExperimentEngine
from cluster.experiments.program import OneRequest
from tests.integration.engine_process import engine_args

LIST = "Here are {number} tips:\n\n" + "\n".join(
    f"{i}. Tip {i}: do this and that, and then do it again." for i in range(1, 5)
)


@dataclass(frozen=True)
class Watched:
    """A run and its peak numbers of requests, threads and KV tokens."""

    drive: Drive
    most_requests: int
    most_threads: int
    most_kv_tokens: int
    free_blocks_after: int


@cache
def experiment_engine(engine: OfflineEngine) -> ExperimentEngine:
    """Return the engine's only wrapper, which counts all its steps."""
    control = engine.control_tokens
    assert control is not None
    hidden = (control.fork_id, control.child_id, engine.tokenizer.eos_token_id)
    return ExperimentEngine(engine, hidden)


@cache
def answers(number: int) -> Sequence[ReplayAnswer]:
    from apar_core.models.apar_tiny import checkpoint_path
    from apar_core.offline.evaluation.replay_text import load_text

    text = load_text(str(checkpoint_path()))
    lines = [
        TraceLine(str(i), "writing", f"Give me {i} tips.", LIST.format(number=i))
        for i in range(number)
    ]
    return replay_answers(lines, text, text.tokens)[0]


def watched(engine: OfflineEngine, conditions: Conditions, number: int, forks: bool) -> Watched:
    """Run this many answers."""
    opened = experiment_engine(engine)
    most = {"requests": 0, "threads": 0, "kv": 0}
    update = opened.scheduler.update_from_output

    def watching(*args: Any, **kwargs: Any) -> Any:
        running = [request.request_id for request in opened.scheduler.running]
        most["requests"] = max(most["requests"], len({name.split("~")[0] for name in running}))
        most["threads"] = max(most["threads"], len(running))
        most["kv"] = max(most["kv"], opened.kv_tokens_in_use)
        return update(*args, **kwargs)

    opened.scheduler.update_from_output = watching
    try:
        questions = answers(number)
        found = drive(_plan(opened, conditions, questions, forks=forks), sample_s=0.1)
    finally:
        opened.scheduler.update_from_output = update
    pool = opened.scheduler.kv_cache_manager.block_pool
    return Watched(found, most["requests"], most["threads"], most["kv"], pool.get_num_free_blocks())


def wrong_answer(engine: OfflineEngine) -> Drive:
    """Run a program whose engine request has a token that is not in its answer."""
    question = answers(2)[0]

    class Wrong(OneRequest):
        def start(self) -> list[Any]:
            [submission] = super().start()
            other = [question.flat[1], *question.flat[1:]]
            submission.sampling["extra_args"] |= replay_args({"": other})
            return [submission]

    opened = experiment_engine(engine)
    plan = RunPlan(opened, Conditions(), lambda index: Wrong(question, forks=False), 1)
    return drive(plan, sample_s=1.0)


@dataclass(frozen=True)
class SideBySide:
    """Runs of two engines, sequential and forked, and their total time."""

    drives: Sequence[Drive]
    elapsed_s: float
    threads_left: int


def side_by_side(engine: OfflineEngine, number: int) -> SideBySide:
    """Run the same answers in this engine and in a second one of this process."""
    second = OfflineEngine(**engine_args(logits_processors=[REPLAY], num_gpu_blocks_override=129))
    try:
        engines = (experiment_engine(engine), experiment_engine(second))
        questions = answers(number)
        plans = [
            _plan(opened, Conditions(max_requests=4), questions, forks=forks)
            for opened, forks in zip(engines, (False, True), strict=True)
        ]
        start_s = time.perf_counter()
        drives = drive_side_by_side(plans, sample_s=0.1)
        elapsed_s = time.perf_counter() - start_s
        left = sum(len(opened.scheduler.requests) for opened in engines)
    finally:
        second.shutdown()
    return SideBySide(drives, elapsed_s, left)


def _plan(
    opened: ExperimentEngine,
    conditions: Conditions,
    questions: Sequence[ReplayAnswer],
    *,
    forks: bool,
) -> RunPlan:
    return RunPlan(
        opened,
        conditions,
        lambda index: OneRequest(questions[index], forks=forks),
        len(questions),
    )


def abort_and_sizes(engine: OfflineEngine) -> tuple[int, int, int]:
    """Return the threads left after an abort, the cache's blocks, and the block size."""
    opened = experiment_engine(engine)
    opened.abort_all()
    return len(opened.scheduler.requests), opened.num_blocks, opened.block_size
