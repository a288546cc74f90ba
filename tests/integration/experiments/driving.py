"""What the tests of the driver have an engine do; each function runs in the engine's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from apar_core.engine.offline import OfflineEngine
from apar_core.engine.replay import replay_args
from apar_core.workload.replay_answers import ReplayAnswer, replay_answers
from apar_core.workload.trace import TraceLine
from cluster.experiments.driver import Drive, drive
from cluster.experiments.experiment_engine import Conditions, ExperimentEngine
from cluster.experiments.program import OneRequest

LIST = "Here are {number} tips:\n\n" + "\n".join(
    f"{i}. Tip {i}: do this and that, and then do it again." for i in range(1, 5)
)


@dataclass(frozen=True)
class Watched:
    """A run, and the most that it had at once."""

    drive: Drive
    most_requests: int
    most_threads: int
    most_kv_tokens: int
    free_blocks_after: int


@cache
def experiment_engine(engine: OfflineEngine) -> ExperimentEngine:
    """One for all calls: it counts the engine's steps from then on."""
    control = engine.control_tokens
    assert control is not None
    hidden = (control.fork_id, control.child_id, engine.tokenizer.eos_token_id)
    return ExperimentEngine(engine, hidden)


@cache
def answers(number: int) -> Sequence[ReplayAnswer]:
    from apar_core.evaluation.replay_text import load_text
    from apar_core.models.apar_tiny import checkpoint_path

    text = load_text(str(checkpoint_path()))
    lines = [
        TraceLine(str(i), "writing", f"Give me {i} tips.", LIST.format(number=i))
        for i in range(number)
    ]
    return replay_answers(lines, text, text.tokens)[0]


def watched(engine: OfflineEngine, conditions: Conditions, number: int, forks: bool) -> Watched:
    """Drive so many answers."""
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
        found = drive(
            opened,
            conditions,
            lambda index: OneRequest(questions[index], forks=forks),
            number,
            sample_s=0.1,
        )
    finally:
        opened.scheduler.update_from_output = update
    pool = opened.scheduler.kv_cache_manager.block_pool
    return Watched(found, most["requests"], most["threads"], most["kv"], pool.get_num_free_blocks())


def wrong_answer(engine: OfflineEngine) -> Drive:
    """A program whose engine request has one token that is not in its answer."""
    question = answers(2)[0]

    class Wrong(OneRequest):
        def start(self) -> list[Any]:
            [submission] = super().start()
            other = [question.flat[1], *question.flat[1:]]
            submission.sampling["extra_args"] |= replay_args({"": other})
            return [submission]

    return drive(
        experiment_engine(engine),
        Conditions(),
        lambda index: Wrong(question, forks=False),
        1,
        sample_s=1.0,
    )


def abort_and_sizes(engine: OfflineEngine) -> tuple[int, int, int]:
    """Threads left after an abort; blocks of the cache; tokens of a block."""
    opened = experiment_engine(engine)
    opened.abort_all()
    return len(opened.scheduler.requests), opened.num_blocks, opened.block_size
